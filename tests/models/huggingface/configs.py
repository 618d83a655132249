"""A tiny configuration of any family of decoders that transformers knows.

The family's default configuration with its sizes made small, field by field; what the family alone
has (norms, biases, kinds of layers, rotary embedding, scalings) stays what it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS = 4
WINDOW = 5

# Names differ between families for the same size.
_SIZES: dict[tuple[str, ...], Any] = {
    ("hidden_size", "n_embd", "d_model", "dim"): 32,
    ("intermediate_size", "ffn_dim", "n_inner"): 48,
    ("num_hidden_layers", "n_layer", "n_layers"): LAYERS,
    ("num_attention_heads", "n_head", "n_heads"): 4,
    ("num_key_value_heads",): 2,
    ("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"): 8,
    ("vocab_size",): 64,
    # Mixtures of experts.
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "moe_topk", "moe_k"): 2,
    ("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"): 1,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"): 16,
    # Latent attention.
    ("qk_rope_head_dim",): 4,
    ("qk_head_dim",): 12,
    # Recurrent layers.
    ("linear_num_key_heads",): 2,
    ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_heads"): 4,
    ("linear_key_head_dim", "linear_head_dim", "ssm_state_size", "mamba_d_state"): 8,
    ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim"): 16,
    ("mamba_n_groups", "n_groups"): 2,
    ("mamba_chunk_size", "chunk_size"): 4,
    ("moe_shared_expert_intermediate_size", "shared_intermediate_size"): 16,
    ("num_experts_per_token",): 2,
    # Tokens that the small vocabulary has.
    ("pad_token_id",): None,
    ("bos_token_id",): 1,
    ("eos_token_id",): 2,
    # Dropout would make a comparison random.
    (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "dropout",
        "embd_dropout",
        "embd_pdrop",
        "embedding_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "residual_dropout",
    ): 0.0,
}
# Of which the family's default has one kind alone.
_LAYER_TYPES = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "num_experts_per_layer")


def tiny(model_type: str, **more: Any) -> PretrainedConfig:
    """Four layers of width 32 with 4 heads, 2 key/value heads and 64 words, windows of 5 tokens.

    Mixtures have 4 experts of which a token meets 2. Lists with an entry per layer are cut so that
    every kind of layer stays.

    Args:
        model_type: as transformers names the family; of one that reads more than text, its text
            decoder's configuration is returned.
        more: fields that are set on top.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type).get_text_config()
    kind = type(default)
    known = {name for name in {*default.to_dict(), *dir(default)} if not _computed(kind, name)}
    values = {name: value for names, value in _SIZES.items() for name in names if name in known}
    if getattr(default, "sliding_window", None) is not None:
        values["sliding_window"] = WINDOW
    for name in _PER_LAYER:
        of_layers = getattr(default, name, None)
        if name in known and isinstance(of_layers, list | tuple) and len(of_layers) > LAYERS:
            values[name] = _kinds(list(of_layers))
    if "qk_rope_head_dim" in known:
        # Latent attention rotates heads of this width, and has no grouped queries.
        values |= {"head_dim": values["qk_rope_head_dim"], "num_key_value_heads": 4}
    more = _LAYER_TYPES.get(model_type, {}) | more
    return kind(**{name: value for name, value in values.items() if name in known} | more)


def _computed(kind: type, name: str) -> bool:
    """Whether a field follows from others, so that it cannot be set."""
    found = getattr(kind, name, None)
    return isinstance(found, property) and found.fset is None


def _kinds(of_layers: list[Any]) -> list[Any]:
    """One entry for each layer: the first ones, and the last, if these are all kinds there are."""
    short = [*of_layers[: LAYERS - 1], of_layers[-1]]
    kinds = list(dict.fromkeys(of_layers))
    return short if len(set(short)) == len(kinds) else (kinds * LAYERS)[:LAYERS]
