"""Families of transformers that train exactly on packed rows, and configs that are refused.

A family is a ``model_type``. Families outside ``CHECKED`` may work as well, and give a warning.
Configs are refused if training would be *silently* wrong: the loss would fall, but the gradients
would not be those of separate documents. The config or the modules decide, not the family's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import AutoModelForCausalLM

from lightning_wlb.models.huggingface.recurrent import FAMILIES

PARTS = {
    "bamba": ("embed_tokens", "layers", "final_layernorm"),
    "granitemoehybrid": ("embed_tokens", "layers", "norm"),
    "lfm2": ("embed_tokens", "layers", "embedding_norm"),
    "lfm2_moe": ("embed_tokens", "layers", "embedding_norm"),
    "lfm3": ("embed_tokens", "layers", "embedding_norm"),
    "nemotron_h": ("embeddings", "layers", "norm_f"),
}
"""Embedding, layers and last norm of families without a pipeline plan in transformers."""

OWN_PLANS: dict[str, dict[str, str]] = {
    # Families without a plan in their config: transformers' styles, and "last" and "once".
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        # Stored transposed with gate and up alternating: a share of the last dim has whole pairs.
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "last",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "once",
    }
}


def _gathered(module: str, *projections: str) -> dict[str, str]:
    """Projections whose columns are split in memory, and gathered before a recurrence."""
    return {f"layers.*.{module}.{name}": "colwise_gather_output" for name in projections}


def _feed_forward(module: str, up: Sequence[str], down: str) -> dict[str, str]:
    columns = {f"layers.*.{module}.{name}": "colwise" for name in up}
    return columns | {f"layers.*.{module}.{down}": "rowwise"}


_SELF_ATTENTION = _feed_forward("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj")
_DELTA_RULE = {"layers.*.linear_attn.out_proj": "rowwise_split_input"}
RECURRENT_PLANS: dict[str, dict[str, str]] = {
    # These override the plan of a family's config. _gathered: what recurrences need whole.
    "bamba": _SELF_ATTENTION
    | _feed_forward("feed_forward", ("gate_proj", "up_proj"), "down_proj")
    | _gathered("mamba", "in_proj")
    | {"layers.*.mamba.out_proj": "rowwise_split_input"},
    "lfm2": _feed_forward("self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj")
    | _feed_forward("feed_forward", ("w1", "w3"), "w2")
    | _gathered("conv", "in_proj")
    | {"layers.*.conv.out_proj": "rowwise_split_input"},
    "olmo_hybrid": _gathered("linear_attn", "q_proj", "k_proj", "v_proj", "g_proj")
    | {"layers.*.linear_attn.o_proj": "rowwise_split_input"},
    "qwen3_5_moe_text": _DELTA_RULE,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
}
"""How tensor parallelism splits families: transformers' styles by module."""

_CHECKED = """
afmoe apertus arcee aria_text axk1 beam cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granite_swa helium
hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum mimo_v2_flash
minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral olmo olmo2 olmo3 phi
phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
CHECKED = frozenset(_CHECKED.split())
"""Exact on packed rows and under tensor parallelism; tests/models/huggingface checks each family.

After a change run ``python -m tests.models.huggingface.families_page``, for docs/families.md."""

_ATTENTION = {"full_attention", "sliding_attention"}  # layer types that the kernels compute
_ROW_BY_ROW = {"mlp", "moe"}  # that compute nothing across rows
_RECURRENT = {"linear_attention", "conv"}  # of the families in recurrent.FAMILIES

_TERMS = {
    "output_router_logits": "a load-balancing loss (a product of sums over all layers of a"
    " document, which no stage or slice of it has when its backward begins)",
    "z_loss_coefficient": "a loss of the size of the logits",
}
"""Fields of a config that add a term to transformers' own loss."""


def check_config(config: Any) -> None:
    """Raise ValueError for a config that cannot be trained exactly, before anything is built."""
    name = f"model type {config.model_type!r}"
    if config is not config.get_text_config():
        raise ValueError(
            f"{name} takes more than text. Give its text part alone: config.get_text_config()."
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{name} is no causal language model of transformers, one that predicts the next token."
            " Give the config of a family of decoders (docs/families.md)."
        )
    # A family that has such settings by itself (Gemma 4's wider heads) is built by them.
    if own := sorted(_single_layer_settings(config) - _single_layer_settings(type(config)())):
        raise ValueError(
            f"{name} gives single layers settings of their own ({', '.join(own)}), which the"
            " families' modules pass over or cannot be built with. Leave per_layer_config out."
        )
    known = _ATTENTION | (_ROW_BY_ROW | _RECURRENT if config.model_type in FAMILIES else set())
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        raise ValueError(
            f"{name} has layers of type {', '.join(others)}, which read other rows in a way that is"
            " not known here: packed documents would mix. Choose a family whose layer_types are"
            f" {' or '.join(sorted(_ATTENTION))}, or one whose recurrent layers are known:"
            f" {', '.join(sorted(FAMILIES))} (docs/families.md)."
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{name} shares keys between layers (num_kv_shared_layers="
            f"{config.num_kv_shared_layers}), which pipeline stages and slices cannot pass on."
            " Choose another family (docs/families.md)."
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{name} is quantised (quantization_config), and its weights are not numbers that can"
            " be trained. Give a folder with weights in bfloat16 or float32; without weights, the"
            " config without quantization_config."
        )
    for field, term in _TERMS.items():
        if value := getattr(config, field, 0):
            raise ValueError(
                f"{name}: {field}={value} asks for {term}, which is not added to the loss here. Set"
                f" {field}={type(value)(0)}."
            )
    for rope in _rope_types(config):
        if rope == "dynamic":
            raise ValueError(
                f"{name}: rope type 'dynamic' turns all rows by the length of the longest document"
                " in the batch, so a document's result would depend on its neighbours. Use 'yarn',"
                " 'linear' or 'llama3' scaling, which are fixed."
            )


def check_no_noise(config: Any) -> None:
    """Raise ValueError for dropout and noise. Call it last, after errors that have no remedy."""
    for field, value in config.to_dict().items():
        if _is_random(field) and isinstance(value, int | float) and value:
            raise ValueError(
                f"{config.model_type!r}: {field}={value:g}. Dropout and noise would draw other"
                " numbers on every mesh and where backward recomputes, so a run could not be"
                f" repeated or resumed exactly. Set {field}=0.0 in the config."
            )


def row_by_row(config: Any) -> set[int]:
    """Numbers of the layers that compute nothing across rows, such as Nemotron-H's MLP layers."""
    kinds = getattr(config, "layer_types", None) or ()
    return {number for number, kind in enumerate(kinds) if kind in _ROW_BY_ROW}


def longrope_window(config: Any) -> int | None:
    """Most tokens of a document under ``longrope`` scaling; None without this scaling.

    If one document of a batch is longer, the family's code rotates *all* rows of the batch with
    other frequencies, so that a document's result would depend on its neighbours.
    """
    if "longrope" not in _rope_types(config):
        return None
    given = [
        getattr(config, "original_max_position_embeddings", None),
        *(each.get("original_max_position_embeddings") for each in _ropes(config)),
        config.max_position_embeddings,
    ]
    return min(int(each) for each in given if each)


def check_family(model: Any) -> None:
    """Raise ValueError for a built model whose attention cannot be replaced."""
    if not (model._supports_attention_backend or model.config.model_type in FAMILIES):
        raise ValueError(
            f"{type(model).__name__} does not call transformers' attention interface, so packed"
            " documents would attend to each other. Choose another family (docs/families.md)."
        )


def check_parts(model: Any, known: set[int]) -> None:
    """Raise ValueError for parameters outside of embedding, layers and head.

    ``known`` has the ``id`` of each parameter of these.
    """
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if left:
        raise ValueError(
            f"{type(model).__name__} has parameters outside its embedding, layers and head:"
            f" {', '.join(left)}, in no pipeline stage. Choose another family (docs/families.md)."
        )


def _is_random(field: str) -> bool:
    # Dropout of classifiers and summaries belongs to heads that are not built here.
    unused = field.startswith(("classifier", "summary"))
    random = any(each in field for each in ("dropout", "layerdrop", "jitter"))
    return (random or field.endswith("pdrop")) and not unused


def _single_layer_settings(config: Any) -> set[str]:
    per_layer = config.to_dict().get("per_layer_config") or {}
    return {name for layer in per_layer.values() for name in layer}


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The config's rotary parameters: one mapping, or one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in given:
        yield given
    else:
        yield from (each for each in given.values() if isinstance(each, Mapping))


def _rope_types(config: Any) -> set[str]:
    return {each.get("rope_type", "default") for each in _ropes(config)}
