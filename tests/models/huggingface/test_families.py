"""Every family that is said to work does: packed rows equal transformers, document by document.

What would be silently wrong on packed rows is refused, by name and with the remedy.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.families import (
    CHECKED,
    check_config,
    longrope_window,
)
from lightning_wlb.plan import Recompute
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.families_page import REFUSED, page
from tests.models.huggingface.support import KeepDouble, packed_rows, value

# One for each thing that families differ in: plain; q/k norms; windows; sinks and biased experts;
# experts beside a shared one; latent attention; soft caps; scaled logits; packed projections.
COVERING = (
    "llama",
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "qwen2_moe",
    "deepseek_v3",
    "gemma2",
    "cohere",
    "phi3",
    "granite",
    "apertus",
    "gpt_neox",
)
REST = sorted(CHECKED - set(COVERING))
LENGTHS = (7, 1, 13, 20, 3)
TOLERANCE = 1e-10


def decoder_and_plain(family: str):
    """The decoder, and transformers' model with the same values, both in float64."""
    config = tiny(family)
    with torch.device("cpu"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            decoder = HuggingFaceDecoder(config).double()
            plain = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                attn_implementation="eager",
                experts_implementation="eager",
                dtype=torch.float64,
            ).double()
        finally:
            torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(value(name, parameter.shape))
        for name, parameter in decoder.named_parameters():
            whole = value(decoder.family_name(name), decoder.family_shape(name))
            parameter.copy_(whole.view(parameter.shape))
    return decoder.train(), plain.train()


def errors(family: str, recompute: Recompute = "none") -> tuple[float, float]:
    """Relative errors of logits and, the largest of any parameter, of gradients."""
    decoder, plain = decoder_and_plain(family)
    documents, rows = packed_rows(LENGTHS)
    rows = replace(rows, recompute=recompute)
    with KeepDouble():
        wanted = torch.cat([plain(each[None], use_cache=False).logits[0] for each in documents])
        F.cross_entropy(wanted, rows.labels, reduction="sum").backward()
        logits = decoder(replace(rows, labels=None))
        decoder(rows).backward()
    of_logits = float((logits - wanted).detach().norm() / wanted.detach().norm())
    gradients = {name: each.grad for name, each in plain.named_parameters()}
    worst = 0.0
    for name, parameter in decoder.named_parameters():
        other = gradients.pop(decoder.family_name(name))
        # An expert that no token chose: none or zero.
        other = torch.zeros_like(parameter) if other is None else other.view(parameter.shape)
        mine = torch.zeros_like(other) if parameter.grad is None else parameter.grad
        norm = float(other.norm())
        worst = max(worst, float((mine - other).norm()) / (norm or 1.0))
    assert not gradients
    return of_logits, worst


@pytest.mark.parametrize("family", COVERING)
def test_logits_and_gradients_are_those_of_the_documents(family):
    assert max(errors(family)) < TOLERANCE


@pytest.mark.families
@pytest.mark.parametrize("family", REST)
def test_the_other_families(family):
    assert max(errors(family)) < TOLERANCE


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", ["llama", "cohere", "gpt_oss", "deepseek_v3"])
def test_recomputation_changes_nothing(family, recompute):
    assert max(errors(family, recompute)) < TOLERANCE


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_be_exact_is_refused(family):
    with pytest.raises(ValueError, match=REFUSED[family]):
        errors(family)


def test_the_page_of_families_is_made_from_the_lists():
    written = Path(__file__).parents[3] / "docs/families.md"
    assert written.read_text(encoding="utf-8") == page()


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
        ("llama", {"per_layer_config": {1: {"skip": ["attention"]}}}, "Leave per_layer_config out"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'llama' is quantised"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "'dynamic'.*Use 'yarn'"),
        ("qwen2_moe", {"output_router_logits": True}, "Set output_router_logits=False"),
        ("bamba", {"z_loss_coefficient": 0.1}, "Set z_loss_coefficient=0.0"),
        ("minimax", {}, "linear_attention"),
        ("deepseek_v32", {}, "indexed_attention"),
        ("gemma3n_text", {}, "num_kv_shared_layers"),
    ],
)
def test_a_config_that_cannot_be_exact(family, fields, said):
    with pytest.raises(ValueError, match=said):
        check_config(tiny(family, **fields))


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1.*Set attention_dropout=0.0"),
        ("phi3", {"resid_pdrop": 0.2}, "resid_pdrop=0.2"),
        ("mixtral", {"router_jitter_noise": 0.01}, "Set router_jitter_noise=0.0"),
    ],
)
def test_noise_is_refused(family, fields, said):
    with pytest.raises(ValueError, match=said):
        HuggingFaceDecoder(tiny(family, **fields))


def test_a_family_that_cannot_be_trained_is_said_before_its_dropout():
    with pytest.raises(ValueError, match="Choose another family"):
        HuggingFaceDecoder(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2))


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
    from lightning_wlb.models.huggingface import families

    monkeypatch.setattr(families, "CHECKED", frozenset())
    with pytest.warns(UserWarning, match="'llama' is not among.*under tensor parallelism"):
        assert HuggingFaceDecoder(tiny("llama")).tensor_parallel_plan(2)
