"""What a checkpoint holds if several Trainers share a data module, or a step was broken off."""

from contextlib import nullcontext

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.models.language_module import LanguageModule
from tests.models.steps import config, documents, trainer

GIVEN = {"context_window": 32, "micro_batches": 1, "num_workers": 0}


def made():
    return LanguageModule(config(), seed=3)


def position(path):
    return torch.load(path, weights_only=True)["WLBDataModule"]


def test_a_trainer_saves_its_own_position_after_another_has_run(tmp_path):
    """As in a sweep that saves the best of several runs, which share a data module, at its end."""
    shared = WLBDataModule(documents(), validation_documents=2, **GIVEN)
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

    def __init__(self, shared):
        self.shared = shared

    def on_train_epoch_end(self, runner, _):
        given = WLBDataModule(documents(), validation_documents=2, **GIVEN)
        data = runner.datamodule if self.shared else given
        trainer(runner.default_root_dir).validate(made(), data, verbose=False)


def test_no_other_trainer_takes_the_data_module_of_a_fit(tmp_path):
    for shared in (False, True):
        run = trainer(tmp_path, max_epochs=2, limit_train_batches=2, callbacks=[Probes(shared)])
        data = WLBDataModule(documents(), validation_documents=2, **GIVEN)
        if shared:
            with pytest.raises(MisconfigurationException, match="in the middle of a fit, whose"):
                run.fit(made(), data)
        else:
            run.fit(made(), data)
            assert run.global_step == 4


class Fails(LanguageModule):
    """Fails in its third step: in forward, or when the optimizer has moved the parameters."""

    place = ""

    def training_step(self, batch, batch_idx):
        if self.place == "forward" and self.global_step == 2:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

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


@pytest.mark.parametrize("kind", [Fails, ByHand])
@pytest.mark.parametrize("place", ["forward", "step"])
def test_a_step_that_an_exception_breaks_off_is_not_saved(tmp_path, monkeypatch, kind, place):
    """Its parameters have moved, and a resumed run would train the step again."""
    monkeypatch.setattr(kind, "place", place)
    options = {"enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(tmp_path, "at")]}
    run = trainer(tmp_path, max_steps=4, **options)
    broken = pytest.warns(match="has broken off an optimizer step")
    with (
        broken if place == "step" else nullcontext(),
        pytest.raises((KeyboardInterrupt, SystemExit)),
    ):
        run.fit(kind(config(), seed=3), WLBDataModule(documents(), **GIVEN))
    assert [each.name for each in tmp_path.glob("*.ckpt")] == ["at.ckpt"] * (place == "forward")
