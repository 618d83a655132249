"""What becomes of a model's buffers; its parameters are test_gradients.py's."""

import lightning.pytorch as L
import pytest
import torch

from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import Case, config, data, trainer


class Buffered(LanguageModule):
    """Its model has a buffer of numbers and one of integers, made on ``device``."""

    device_of_buffers: str | None = "cpu"

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = Transformer(self.config)
            values = torch.arange(3.0, device=self.device_of_buffers)
            self.model.register_buffer("numbers", values + 0.5)
            self.model.register_buffer("integers", values.long() + 2**40)


class Meta(Buffered):
    device_of_buffers = None


class Look(L.Callback):
    def on_train_start(self, trainer, pl_module) -> None:
        self.numbers = pl_module.model.numbers.clone()
        self.integers = pl_module.model.integers.clone()


def run(rank: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    look = Look()
    trainer(WLBStrategy(), 1, callbacks=[look]).fit(Buffered(config(False)), data(Case()))
    with pytest.raises(ValueError, match="would have no values") as info:
        trainer(WLBStrategy(), 1).fit(Meta(config(False)), data(Case()))
    return look.numbers, look.integers, str(info.value)


def test_buffers_keep_their_values_or_are_refused():
    ((numbers, integers, message),) = run_ranks(run, 1, process_group=False)
    assert torch.equal(numbers, torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64))
    assert torch.equal(integers, torch.arange(3) + 2**40)
    assert "numbers, integers" in message
