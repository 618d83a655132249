"""A resumed run counts steps and epochs like an unbroken one, without the package's strategy."""

import lightning.pytorch as L
import pytest
import torch
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
    """For every batch its first documents, and the learning rate."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, runner, _, batch, __):
        self.steps.append(
            (batch.plan.step, batch.plan.epoch, runner.optimizers[0].param_groups[0]["lr"])
        )


def run(folder, save, ckpt_path=None, kind=ByEpoch, **options):
    taken = Taken()
    callbacks = [taken, ModelCheckpoint(folder, "{step}", save_top_k=-1, **save)]
    runner = trainer(folder, callbacks=callbacks, enable_checkpointing=True, **options)
    data = WLBDataModule(documents(LENGTHS), context_window=40, micro_batches=1, num_workers=0)
    runner.fit(kind(config(), seed=3), data, ckpt_path=ckpt_path)
    return taken.steps


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


class Moves(ByEpoch):
    """Fails while the last batch of an epoch is moved to the device."""

    fails = True

    def on_before_batch_transfer(self, batch, _):
        if self.fails and self.trainer.training and batch.plan.step == 4:
            raise MemoryError
        return batch


class Data(WLBDataModule):
    fails = False

    def on_after_batch_transfer(self, batch, _):
        if self.fails and self.trainer.training and batch.plan.step == 4:
            raise MemoryError
        return batch


@pytest.mark.parametrize("kind", [Moves, Data])
def test_an_exception_before_an_epochs_last_batch_costs_no_epoch(tmp_path, monkeypatch, kind):
    def fit(folder, fails, ckpt_path=None):
        monkeypatch.setattr(Moves, "fails", fails and kind is Moves)
        monkeypatch.setattr(Data, "fails", fails and kind is Data)
        taken = Taken()
        options = {"max_epochs": 3, "enable_checkpointing": True}
        callbacks = [taken, OnExceptionCheckpoint(folder, "broken")]
        runner = trainer(folder, callbacks=callbacks, **options)
        data = Data(documents(LENGTHS), context_window=40, micro_batches=1, num_workers=0)
        runner.fit(Moves(config(), seed=3), data, ckpt_path=ckpt_path)
        return taken.steps

    whole = fit(tmp_path, False)
    with pytest.raises(MemoryError):
        fit(tmp_path, True)
    assert fit(tmp_path, False, tmp_path / "broken.ckpt") == whole[4:]


def test_an_exception_in_the_validation_at_an_epochs_end_leaves_it_over(tmp_path):
    class Validates(ByEpoch):
        fails = False

        def on_before_batch_transfer(self, batch, _):
            if self.fails and not self.trainer.training and self.global_step == 5:
                raise MemoryError
            return batch

    def fit(folder, ckpt_path=None):
        taken = Taken()
        callbacks = [taken, OnExceptionCheckpoint(folder, "broken")]
        runner = trainer(folder, callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
        data = WLBDataModule(
            documents(LENGTHS),
            context_window=40,
            micro_batches=1,
            num_workers=0,
            validation_documents=documents(),
        )
        runner.fit(Validates(config(), seed=3), data, ckpt_path=ckpt_path)
        return taken.steps

    whole = fit(tmp_path)
    Validates.fails = True
    with pytest.raises(MemoryError):
        fit(tmp_path)
    Validates.fails = False
    assert fit(tmp_path, tmp_path / "broken.ckpt") == whole[5:]


def test_code_without_a_module_may_raise_it(tmp_path):
    """As code that torch.compile makes."""
    made = {}
    exec("def fails(): raise MemoryError", made, made)
    made.pop("__name__", None)

    class Compiled(ByEpoch):
        def training_step(self, batch, number):
            if self.global_step == 2:
                eval("fails()", made)
            return super().training_step(batch, number)

    callbacks = [OnExceptionCheckpoint(tmp_path, "broken")]
    runner = trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
    data = WLBDataModule(documents(LENGTHS), context_window=40, micro_batches=1, num_workers=0)
    with pytest.raises(MemoryError):
        runner.fit(Compiled(config(), seed=3), data)
    assert (tmp_path / "broken.ckpt").exists()
