"""A plain head is told from one whose family changes the logits, by running the family's code."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from tests.models.huggingface.configs import tiny


@pytest.mark.parametrize(
    ("family", "fields", "plain"),
    [
        ("llama", {}, True),
        ("granite", {"logits_scaling": 1.0}, True),
        ("granite", {"logits_scaling": 8.0}, False),
        ("cohere", {"logit_scale": 0.0625}, False),
        ("gemma2", {"final_logit_softcapping": 30.0}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("phi", {}, False),  # a bias
    ],
)
def test_plain_heads(family, fields, plain):
    assert HuggingFaceDecoder(tiny(family, **fields)).head.plain is plain
