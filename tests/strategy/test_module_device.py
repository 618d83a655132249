"""The module is on the device of its rank once the model has been split.

The meta device stands in for a GPU: what is moved there says so.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from torchmetrics import MeanMetric

from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, config, data, trainer

META = torch.device("meta")


class Elsewhere(WLBStrategy):
    """Moves the module to a device of its own, after it has split the model on the CPU."""

    def model_to_device(self) -> None:
        self.before = list(self.lightning_module.parameters())
        with mock.patch.object(WLBStrategy, "root_device", META):
            super().model_to_device()


class Module(LanguageModule):
    """With a buffer, a metric, and another name of its model."""

    def __init__(self) -> None:
        super().__init__(config(tied=False, layers=2), learning_rate=1e-2, seed=7)
        self.register_buffer("mine", torch.zeros(1))
        self.mean = MeanMetric()

    def configure_model(self) -> None:
        super().configure_model()
        self.alias = self.model


class Looked(Exception):
    """The run has got as far as the test looks."""


class Look(L.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        assert pl_module.device == pl_module.mine.device == META
        assert pl_module.mean.device == pl_module.mean.mean_value.device == META
        # The shards are those that the strategy has made.
        now = list(pl_module.parameters())
        assert len(now) == len(trainer.strategy.before) > 0
        assert all(one is other for one, other in zip(now, trainer.strategy.before, strict=True))
        assert all(each.device.type == "cpu" for each in now)
        assert pl_module.alias is pl_module.model is not None
        raise Looked


def looks(rank: int) -> None:
    with pytest.raises(Looked):
        trainer(Elsewhere(), 1, callbacks=[Look()]).fit(Module(), data(SMALL))


def test_buffers_metrics_and_the_module_move_and_shards_stay() -> None:
    run_ranks(looks, 1, process_group=False)
