"""What would be silently wrong on packed rows is refused, by name and with the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig

from lightning_wlb.models.huggingface.checks import check_config, longrope_window
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.support import packed_rows

ROPE = {"rope_theta": 1e4, "factor": 4.0}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1.*Set attention_dropout=0.0"),
        ("phi3", {"resid_pdrop": 0.2}, "resid_pdrop=0.2"),
        ("llama", {"per_layer_config": {1: {"skip": ["attention"]}}}, "Leave per_layer_config out"),
        ("mixtral", {"router_jitter_noise": 0.01}, "Set router_jitter_noise=0.0"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'llama' is quantised"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "'dynamic'.*Use 'yarn'"),
        ("qwen2_moe", {"output_router_logits": True}, "Set output_router_logits=False"),
        ("qwen3_next", {}, "linear_attention"),
        ("deepseek_v32", {}, "indexed_attention"),
        ("gemma3n_text", {}, "num_kv_shared_layers"),
    ],
)
def test_a_config_that_cannot_be_exact(family, fields, said):
    with pytest.raises(ValueError, match=said):
        check_config(tiny(family, **fields))


def test_a_model_that_is_no_decoder_is_refused():
    with pytest.raises(ValueError, match="'t5' is no causal language model"):
        check_config(AutoConfig.for_model("t5"))


def test_a_multimodal_config_is_refused_with_its_text_part():
    with pytest.raises(ValueError, match=r"config\.get_text_config\(\)"):
        check_config(AutoConfig.for_model("gemma3"))


@pytest.mark.parametrize(
    ("family", "rope", "window"),
    [
        ("llama", {"rope_type": "yarn", **ROPE, "original_max_position_embeddings": 8}, None),
        ("llama", {"rope_type": "linear", **ROPE}, None),
        ("phi3", LONGROPE, 16),
    ],
)
def test_longrope_has_a_window_and_fixed_scalings_have_none(family, rope, window):
    config = tiny(
        family,
        rope_parameters=rope,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
    )
    assert longrope_window(config) == window


def test_documents_beyond_longropes_window_are_refused_and_shorter_ones_run():
    config = tiny(
        "phi3",
        rope_parameters=LONGROPE,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
    )
    decoder = HuggingFaceDecoder(config)
    decoder.initialise(0)
    _, short = packed_rows((16, 3))
    assert torch.isfinite(decoder(short))
    _, long = packed_rows((17, 3))
    with pytest.raises(ValueError, match=r"at least 17 tokens.*Use context_window=16"):
        decoder(long)


def test_attention_that_asks_for_more_than_the_kernels_compute_is_refused():
    from lightning_wlb.models.huggingface.attention import Running, attention, during

    module = torch.nn.Module()
    module.layer_idx = 0
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="outside of a decoder"):
        attention(module, q, q, q)
    decoder = HuggingFaceDecoder(tiny("llama"))
    _, rows = packed_rows((3,))
    asked = {
        "a mask of its own": {"attention_mask": torch.zeros(1)},
        "attention dropout 0.1": {"dropout": 0.1},
        "bias": {"bias": torch.zeros(1)},
        "without causality": {"is_causal": False},
    }
    from lightning_wlb.distributed.process_groups import NO_GROUPS

    with during(Running(rows, NO_GROUPS, decoder.attention_kernel, False)):
        out, weights = attention(module, q, q, q, is_causal=True, use_cache=False, bias=None)
        assert out.shape == (1, 3, 2, 4)
        assert weights is None
        for said, options in asked.items():
            with pytest.raises(ValueError, match=said):
                attention(module, q, q, q, **options)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        # What these change is in transformers' masks alone.
        ("gemma3_text", {"use_bidirectional_attention": True}, "without causality"),
        (
            "qwen2_moe",
            WINDOWS,
            "gives attention no window",
        ),
    ],
)
def test_what_a_family_does_by_masks_alone_is_refused(family, fields, said):
    decoder = HuggingFaceDecoder(tiny(family, **fields))
    decoder.initialise(0)
    _, rows = packed_rows((5, 3))
    with pytest.raises(ValueError, match=said):
        decoder(rows)


def test_a_layer_that_does_not_attend_is_refused():
    decoder = HuggingFaceDecoder(tiny("llama"))
    decoder.initialise(0)
    decoder.layers["2"].forward = lambda hidden, **options: hidden
    _, rows = packed_rows((5, 3))
    with pytest.raises(ValueError, match=r"layers \[2\] did not call attention"):
        decoder(replace(rows, labels=None))


def test_an_unlisted_family_runs_with_a_warning(monkeypatch):
    from lightning_wlb.models.huggingface import decoder

    monkeypatch.setattr(decoder, "EXACT", frozenset())
    monkeypatch.setattr(decoder, "TENSOR_PARALLEL", frozenset())
    with pytest.warns(UserWarning, match="'llama' is not among"):
        built = HuggingFaceDecoder(tiny("llama"))
    with pytest.warns(UserWarning, match="under tensor parallelism"):
        assert built.tensor_parallel_plan(2)
