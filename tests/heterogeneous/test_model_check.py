"""Models whose buffers steps on other pipelines could not compute again are refused."""

from __future__ import annotations

import pytest
import torch

from lightning_wlb.heterogeneous.setup import check_buffers
from lightning_wlb.models.transformer import Transformer
from tests.strategy.harness import SMALL_TIED, module


def buffers(persistent: bool, device: str) -> None:
    model = Transformer(module(SMALL_TIED).config).to("meta")
    model.layers["0"].register_buffer("absent", None)
    model.layers["0"].register_buffer("bias", torch.ones(2, device=device), persistent)
    check_buffers(model)


def test_buffers_whose_values_are_not_computed_are_named() -> None:
    buffers(persistent=False, device="cpu")
    with pytest.raises(ValueError, match=r"layers.0.bias is a buffer that belongs"):
        buffers(persistent=True, device="cpu")
    with pytest.raises(ValueError, match=r"Buffers on the meta device .* layers.0.bias"):
        buffers(persistent=False, device="meta")
