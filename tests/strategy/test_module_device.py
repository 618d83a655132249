"""The module is on the device of its rank once the model has been split.

The meta device stands in for a GPU: what is moved there says so.
"""

from __future__ import annotations

import torch
from torchmetrics import MeanMetric

from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.split_model import SplitModel
from tests.strategy.harness import SMALL, module

META = torch.device("meta")


def with_more_than_a_model() -> LanguageModule:
    """A module with a buffer, a metric, and another name of its model."""
    made = module(SMALL)
    made.configure_model()
    made.register_buffer("mine", torch.zeros(1))
    made.mean, made.alias = MeanMetric(), made.model
    return made


def test_buffers_metrics_and_the_module_move_and_shards_stay() -> None:
    made = with_more_than_a_model()
    before = list(made.parameters())
    SplitModel.move_rest(made, META)
    assert made.device == made.mine.device == META
    assert made.mean.device == made.mean.mean_value.device == META
    now = list(made.parameters())
    assert len(now) == len(before) > 0
    assert all(one is other for one, other in zip(now, before, strict=True))
    assert all(each.device.type == "cpu" for each in now)
    assert made.alias is made.model is not None
