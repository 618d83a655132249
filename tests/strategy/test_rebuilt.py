"""Models of which steps elsewhere would run another one are refused by what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_wlb.models.transformer import Transformer
from lightning_wlb.strategy.parallelize import keep_stages
from lightning_wlb.strategy.rebuilt import check_rebuilt
from tests.strategy.harness import SMALL_TIED, module


def check(change: Callable[[Transformer], Any], *, built: bool = False) -> None:
    """Check a stage of a model that was changed after it was built, or in ``build_model``."""
    own = module(SMALL_TIED)
    own.configure_model()
    rebuilt = Transformer(own.config).to("meta")
    change(rebuilt if built else own.model)
    keep_stages(own.model, [range(1), range(1, 2)], 1, 2)
    check_rebuilt(own, rebuilt)


def buffer(persistent: bool, device: str) -> Callable[[Transformer], None]:
    values = torch.ones(2, device=device)
    return lambda model: model.layers["0"].register_buffer("bias", values, persistent)


def test_what_is_built_alike_passes() -> None:
    check(lambda model: None)
    check(buffer(persistent=False, device="cpu"), built=True)


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


def test_buffers_whose_values_are_not_computed_are_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"layers.0.bias is a buffer that belongs"):
        check(buffer(persistent=True, device="cpu"), built=True)
    with pytest.raises(ValueError, match=r"Buffers on the meta device .* layers.0.bias"):
        check(buffer(persistent=False, device="meta"), built=True)
