"""Models of which steps elsewhere would run another one are refused by what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_wlb.heterogeneous.setup import check_buffers, check_rebuilt
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.training.parallelize import keep_stages
from tests.strategy.harness import SMALL_TIED, module


def check(change: Callable[[Transformer], Any]) -> None:
    """Check a stage of a model that was changed after it was built."""
    own = module(SMALL_TIED)
    own.configure_model()
    change(own.model)
    keep_stages(own.model, [range(1), range(1, 2)], 1, 2)
    check_rebuilt(own, Transformer(own.config).to("meta"))


def test_what_is_built_alike_passes() -> None:
    check(lambda model: None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.head.requires_grad_(False), "head.weight"),
        (lambda model: setattr(model.layers["1"], "feed_forward", nn.Identity()), "feed_forward"),
        (lambda model: model.head.register_parameter("extra", model.head.weight), "head.extra"),
    ],
)
def test_what_was_changed_afterwards_is_named(change: Callable[..., Any], name: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{name} of the model is not as"):
        check(change)


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
