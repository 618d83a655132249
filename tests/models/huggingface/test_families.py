"""Every family that is said to work does: packed rows equal transformers, document by document."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.families import EXACT, REFUSED, page
from lightning_wlb.plan import Recompute
from tests.models.huggingface.configs import tiny
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
REST = sorted(set(EXACT) - set(COVERING))
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
