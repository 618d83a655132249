"""A resumed run counts steps and epochs like an unbroken one, without the package's strategy."""

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.models.language_module import LanguageModule
from tests.models.steps import config, documents, trainer

LENGTHS = (25, 9, 38, 17, 30, 6, 40, 21)


class ByEpoch(LanguageModule):
    """Its learning rate is halved after every epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Overrides(ByEpoch):
    """Does not call Lightning's or this package's own."""

    def on_train_start(self):
        pass

    def on_save_checkpoint(self, checkpoint):
        pass


class Taken(L.Callback):
    """For every batch its step and epoch in the documents, and the learning rate."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, runner, _, batch, __):
        self.steps.append(
            (batch.plan.step, batch.plan.epoch, runner.optimizers[0].param_groups[0]["lr"])
        )


def fit(folder, saves, ckpt_path=None, kind=ByEpoch, opens=WLBDataModule, held=0, **options):
    taken = Taken()
    runner = trainer(folder, callbacks=[taken, saves], enable_checkpointing=True, **options)
    given = {"context_window": 40, "micro_batches": 1, "num_workers": 0}
    data = opens(documents(LENGTHS), validation_documents=held, **given)
    runner.fit(kind(config(), seed=3), data, ckpt_path=ckpt_path)
    return taken.steps


def run(folder, save, ckpt_path=None, **options):
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, **save)
    return fit(folder, saves, ckpt_path, **options)


@pytest.mark.parametrize("save", [{"every_n_train_steps": 1}, {"every_n_epochs": 1}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "max_steps": 100},
        {"max_epochs": 3, "limit_train_batches": 7},
        {"max_steps": 12, "limit_train_batches": 3},
    ],
    ids=str,
)
def test_every_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path, save, options):
    whole = run(tmp_path / "whole", save, **options)
    assert len({epoch for _, epoch, _ in whole}) > 1
    saved = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(saved) > 1
    for path in saved:
        rest = run(tmp_path / path.stem, save, path, **options)
        assert rest == whole[int(path.stem.removeprefix("step=")) :], path.stem


def test_hooks_that_are_overridden_count_too(tmp_path):
    save, options = {"every_n_epochs": 1}, {"max_epochs": 3, "max_steps": 100, "kind": Overrides}
    whole = run(tmp_path / "whole", save, **options)
    assert run(tmp_path / "rest", save, tmp_path / "whole/step=5.ckpt", **options) == whole[5:]


@pytest.mark.parametrize("steps", [1, 4, 5, 6])
@pytest.mark.parametrize("bounds", [{}, {"max_steps": 100}], ids=str)
def test_a_run_that_max_steps_ended_goes_on_in_its_epoch(tmp_path, steps, bounds):
    save = {"every_n_epochs": 1, "save_on_train_epoch_end": True, "save_last": True}
    whole = run(tmp_path / "whole", save, max_epochs=3)
    run(tmp_path / "cut", save, max_steps=steps)
    (last,) = (tmp_path / "cut").glob("last.ckpt")
    assert run(tmp_path / "rest", save, last, max_epochs=3, **bounds) == whole[steps:]


@pytest.mark.parametrize("when", [{"check_val_every_n_epoch": 2}, {"val_check_interval": 5}, {}])
def test_a_run_that_is_over_stays_so_however_often_it_is_started_again(tmp_path, when):
    """The second start trains nothing, and saves; the third trained another epoch."""
    options = {"held": documents(), "ckpt_path": "last", "max_epochs": 2, **when}
    parts = [fit(tmp_path, ModelCheckpoint(tmp_path, save_last=True), **options) for _ in range(4)]
    assert {epoch for _, epoch, _ in parts[0]} == {0, 1}
    assert parts[1:] == [[], [], []]
    more = fit(tmp_path, ModelCheckpoint(tmp_path), **{**options, "max_epochs": 3})
    assert [epoch for _, epoch, _ in more] == [2] * len(parts[0][len(parts[0]) // 2 :])


class Data(WLBDataModule):
    def on_after_batch_transfer(self, batch, _):
        if self.trainer.training:
            self.trainer.lightning_module.fail_at(batch.plan.step == 4)
        return batch


class Fails(ByEpoch):
    """Fails at the named place, in its first attempt."""

    place, fails = "", False

    def fail_at(self, here):
        if here and self.fails:
            raise MemoryError

    def on_before_batch_transfer(self, batch, _):
        if self.place == "moved":
            self.fail_at(self.trainer.training and batch.plan.step == 4)
        elif self.place == "validated":
            self.fail_at(not self.trainer.training and self.global_step == 5)
        return batch

    def on_train_epoch_end(self):
        if self.place == "moves" and self.fails and self.global_step == 5:
            self.trainer.strategy.batch_to_device({})

    def training_step(self, batch, number):
        if self.place == "compiled" and self.fails and self.global_step == 2:
            # Code that torch.compile makes belongs to no module.
            exec("raise MemoryError", {})
        return super().training_step(batch, number)


@pytest.mark.parametrize(
    ("place", "opens", "steps"),
    [
        ("moved", WLBDataModule, 4),  # the last batch of an epoch, to the device
        ("", Data, 4),
        ("validated", WLBDataModule, 5),  # the same of the validation at an epoch's end
        ("moves", WLBDataModule, 5),  # a callback moves something of its own at an epoch's end
        ("compiled", WLBDataModule, 2),
    ],
)
def test_an_exception_costs_no_epoch(tmp_path, monkeypatch, place, opens, steps):
    monkeypatch.setattr(Fails, "place", place)
    options = {"kind": Fails, "opens": opens, "held": documents(), "max_epochs": 3}
    saves = OnExceptionCheckpoint(tmp_path, "broken")
    whole = fit(tmp_path, saves, **options)
    monkeypatch.setattr(Fails, "fails", True)
    with pytest.raises((MemoryError, MisconfigurationException)):
        fit(tmp_path, saves, **options)
    monkeypatch.setattr(Fails, "fails", False)
    assert fit(tmp_path, saves, tmp_path / "broken.ckpt", **options) == whole[steps:]
