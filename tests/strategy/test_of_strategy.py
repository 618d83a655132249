"""A rank's stage in the steps of a strategy."""

from __future__ import annotations

import torch

from lightning_wlb.links.link import Link
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme
from lightning_wlb.strategy.of_strategy import OfStrategy, Settings
from lightning_wlb.strategy.travel import weights_of


def test_buffers_of_a_stage_are_on_the_device_of_the_rank() -> None:
    """Parameters come later; a rotary table of a Hugging Face family is made on the host."""

    def build() -> Transformer:
        with torch.device("meta"):
            model = Transformer(TransformerConfig.preset("tiny"))
        model.layers["0"].register_buffer("table", torch.ones(2), persistent=False)
        return model

    # A stand-in for a GPU: any device but the host.
    device = torch.device("meta")
    one = (Scheme(0, (TransformerConfig.preset("tiny").layers,)),)
    link = Link(weights_of(build(), (1,)), one, one, 0, 1)
    own = OfStrategy(link, Settings(build, 8, "1f1b", torch.float32, torch.float32, device))
    assert own.model.layers["0"].table.device == device
    assert all(parameter.is_meta for parameter in own.model.parameters())
