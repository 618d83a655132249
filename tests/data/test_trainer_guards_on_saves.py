"""What a checkpoint holds if several Trainers share a data module, or a step was broken off."""

import copy
from contextlib import nullcontext

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.models.language_module import LanguageModule
from tests.models.steps import config, documents, trainer

GIVEN = {"context_window": 32, "micro_batches": 1, "num_workers": 0}


def made():
    return LanguageModule(config(), seed=3)


def validated():
    return WLBDataModule(documents(), validation_documents=2, **GIVEN)


def position(path):
    return torch.load(path, weights_only=True)["WLBDataModule"]


def test_a_trainer_saves_its_own_position_after_another_has_run(tmp_path):
    """As in a sweep that saves the best of several runs, which share a data module, at its end."""
    shared = validated()
    first = trainer(tmp_path, max_steps=2)
    first.fit(made(), shared)
    first.save_checkpoint(tmp_path / "before.ckpt")
    second = trainer(tmp_path, max_steps=4)
    second.fit(made(), shared)
    first.save_checkpoint(tmp_path / "fitted.ckpt")
    trainer(tmp_path).validate(made(), shared, verbose=False)
    first.save_checkpoint(tmp_path / "validated.ckpt")
    second.save_checkpoint(tmp_path / "other.ckpt")
    at = [position(tmp_path / f"{name}.ckpt") for name in ("before", "fitted", "validated")]
    assert at[0]["planner"] is not None
    assert at == [at[0]] * 3
    assert position(tmp_path / "other.ckpt") not in at


class Probes(L.Callback):
    """Evaluates by a Trainer of its own, in the middle of a fit."""

    def __init__(self, data):
        self.data = data

    def on_train_epoch_end(self, runner, _):
        trainer(runner.default_root_dir).validate(made(), self.data, verbose=False)


def test_no_other_trainer_takes_the_data_module_of_a_fit(tmp_path):
    """But it may have another one, or one of a fit that is over."""
    run = trainer(tmp_path, max_steps=2)
    earlier, given = validated(), validated()
    run.fit(made(), earlier)
    for steps, data in ((4, validated()), (6, earlier), (8, given)):
        run.fit_loop.epoch_loop.max_steps = steps
        run.callbacks = [Probes(data)]
        if data is given:
            with pytest.raises(MisconfigurationException, match="whose fit goes on, and would"):
                run.fit(made(), given)
        else:
            run.fit(made(), given)
            assert run.global_step == steps


def test_nor_does_it_at_the_end_of_a_validation(tmp_path):
    class Evaluates(L.Callback):
        def on_validation_end(self, runner, _):
            trainer(tmp_path).validate(made(), runner.datamodule, verbose=False)

    run = trainer(tmp_path, max_epochs=2, callbacks=[Evaluates()], num_sanity_val_steps=0)
    with pytest.raises(MisconfigurationException, match="whose fit goes on, and would"):
        run.fit(made(), validated())


def test_another_trainer_evaluates_when_the_fit_has_trained_its_last_batch(tmp_path):
    class Evaluates(L.Callback):
        seen = 0

        def on_train_end(self, runner, _):
            trainer(tmp_path).validate(made(), runner.datamodule, verbose=False)
            Evaluates.seen += 1

    trainer(tmp_path, max_steps=2, callbacks=[Evaluates()]).fit(made(), validated())
    assert Evaluates.seen == 1


def test_a_copy_of_a_trainer_saves_the_position(tmp_path):
    run = trainer(tmp_path, max_steps=2)
    run.fit(made(), WLBDataModule(documents(), **GIVEN))
    copy.deepcopy(run).save_checkpoint(tmp_path / "copy.ckpt")
    assert position(tmp_path / "copy.ckpt")["planner"]["step"] == 2


class Fails(LanguageModule):
    """Fails in its third step, in forward or a hook, or when the optimizer has moved parameters."""

    place = ""

    def training_step(self, batch, batch_idx):
        if self.place == "forward" and self.global_step == 2:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, _):
        if self.place == "hook" and self.global_step == 2:
            raise KeyboardInterrupt

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.interrupt())
        return optimizer

    def interrupt(self):
        if self.place == "step" and self.global_step == 2:
            raise KeyboardInterrupt


class ByHand(Fails):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class Rates(Fails):
    """Fails in the step of a scheduler, which follows the optimizer's."""

    place = "step"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, *_):
        self.interrupt()


def break_off(tmp_path, kind, ckpt_path=None, scaled=False):
    """Whether the run saves on its exception."""
    name = "again" if ckpt_path else "at"
    options = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if scaled else {}
    callbacks = [OnExceptionCheckpoint(tmp_path, name)]
    run = trainer(tmp_path, max_steps=4, enable_checkpointing=True, callbacks=callbacks, **options)
    broken = pytest.warns(match="has broken off an optimizer step")
    with (
        broken if kind.place == "step" else nullcontext(),
        pytest.raises((KeyboardInterrupt, SystemExit)),
    ):
        run.fit(kind(config(), seed=3), WLBDataModule(documents(), **GIVEN), ckpt_path=ckpt_path)
    return (tmp_path / f"{name}.ckpt").exists()


@pytest.mark.parametrize("kind", [Fails, ByHand])
@pytest.mark.parametrize("place", ["forward", "hook", "step"])
def test_a_step_that_an_exception_breaks_off_is_not_saved(tmp_path, monkeypatch, kind, place):
    """Its parameters have moved, and a resumed run would train the step again."""
    monkeypatch.setattr(kind, "place", place)
    assert break_off(tmp_path, kind) == (place != "step")
    if place == "hook":  # the next exception is not taken for the one of the step before
        monkeypatch.setattr(kind, "place", "forward")
        assert break_off(tmp_path, kind, tmp_path / "at.ckpt")


def test_nor_is_one_whose_schedule_would_lag_from_then_on(tmp_path):
    assert not break_off(tmp_path, Rates)


@pytest.mark.parametrize("place", ["forward", "hook", "step"])
def test_a_step_with_scaled_gradients_is_broken_off_behind_its_hooks(tmp_path, monkeypatch, place):
    monkeypatch.setattr(Fails, "place", place)
    assert break_off(tmp_path, Fails, scaled=True) == (place != "step")
