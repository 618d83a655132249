"""What saves and goes back: a checkpoint before the first step, searches for a learning rate.

Before the first step on two ranks, compared with a run that does neither.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_wlb.data.trainer_guards import called_by
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.checkpoints.small_checkpoints import as_one_file
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, Recorder, data, module, trainer

STEPS = 4


class SavesFirst(L.Callback):
    """Saves before the first step, and logs what differs from rank to rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        value = torch.tensor(float(trainer.global_rank))
        pl_module.log("rank", value, on_step=False, on_epoch=True, sync_dist=True)


def losses(*callbacks: L.Callback, model=None, **options) -> tuple[list[float], L.Trainer]:
    recorder = Recorder()
    runner = trainer(
        WLBStrategy(1, 2), 2, max_steps=STEPS, callbacks=[recorder, *callbacks], **options
    )
    runner.fit(model or module(SMALL), data(SMALL), ckpt_path=options.pop("ckpt_path", None))
    return recorder.losses, runner


def before_the_first_step(rank: int, folder: Path) -> list[float]:
    unbroken, _ = losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved, runner = losses(SavesFirst(folder / "first.ckpt"))
    assert saved == unbroken
    assert runner.callback_metrics["rank"] == 0.5, "the mean over the ranks"
    assert not [each for each in caught if "sync_dist" in str(each.message)]
    recorder = Recorder()
    resumed = trainer(WLBStrategy(1, 2), 2, max_steps=STEPS, callbacks=[recorder])
    resumed.fit(module(SMALL), data(SMALL), ckpt_path=folder / "first.ckpt")
    assert recorder.losses == unbroken

    found, _ = losses(
        LearningRateFinder(num_training_steps=5, update_attr=False), default_root_dir=folder
    )
    assert found == unbroken
    searcher = trainer(WLBStrategy(1, 2), 2, default_root_dir=folder)
    made = module(SMALL)
    result = Tuner(searcher).lr_find(made, data(SMALL), num_training=14, update_attr=True)
    assert result is not None
    assert made.learning_rate == result.suggestion() != 1e-2
    assert {each.name for each in folder.iterdir()} == {"first.ckpt"}
    return unbroken


def test_a_save_or_a_search_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    unbroken, _ = run_ranks(before_the_first_step, 2, tmp_path, process_group=False)
    as_one_file(tmp_path / "first.ckpt", tmp_path / "file.ckpt")
    recorder = Recorder()
    alone = trainer("auto", 1, max_steps=STEPS, callbacks=[recorder])
    alone.fit(module(SMALL), data(SMALL), ckpt_path=tmp_path / "file.ckpt")
    assert recorder.losses == pytest.approx(unbroken, rel=1e-10)


def new_optimizers(rank: int, home: Path, strategy: str) -> None:
    """Saves after fits, searches and evaluations of one Trainer, and of another."""
    options = {"max_steps": 2, "default_root_dir": home}
    run, other = trainer(strategy, 1, **options), trainer(strategy, 1, **options)
    made, documents = module(SMALL), data(SMALL, validation_documents=2)

    def search(run: L.Trainer) -> None:
        Tuner(run).lr_find(made, documents, num_training=3, update_attr=False)

    def refused() -> bool:
        with pytest.raises(MisconfigurationException, match="After 2 steps a fit has begun with"):
            run.save_checkpoint(home / "refused.ckpt")
        return True

    run.fit(made, documents)
    run.save_checkpoint(home / "two.ckpt")
    search(run)
    assert refused()
    run.fit(made, documents)  # there is no step left
    assert refused()
    run.validate(made, documents, verbose=False)
    assert refused()
    run.fit(made, documents, ckpt_path=home / "two.ckpt")
    run.save_checkpoint(home / "again.ckpt")
    run.validate(made, documents, ckpt_path=home / "two.ckpt", verbose=False)
    search(run)
    run.fit_loop.epoch_loop.max_steps = 3
    run.fit(made, documents)
    run.save_checkpoint(home / "three.ckpt")
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(made, documents, ckpt_path=home / "three.ckpt")
    assert run.global_step == 4
    other.validate(made, documents, ckpt_path=home / "two.ckpt", verbose=False)
    search(other)
    other.save_checkpoint(home / "evaluated.ckpt")
    with pytest.raises(MisconfigurationException, match="this one serves to evaluate"):
        other.fit(made, documents, ckpt_path=home / "evaluated.ckpt")
    names = ["again.ckpt", "evaluated.ckpt", "three.ckpt", "two.ckpt"]
    assert sorted(each.name for each in home.iterdir()) == names


@pytest.mark.parametrize("strategy", ["wlb", "auto"])
def test_nothing_is_saved_with_new_optimizers_before_a_batch(tmp_path: Path, strategy: str) -> None:
    """A search makes new ones, and leaves them: whoever resumed would lack the old ones' state."""
    run_ranks(new_optimizers, 1, tmp_path, strategy, process_group=False)


def stopped(rank: int, home: Path) -> int:
    stops = LambdaCallback(on_train_batch_start=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    run = trainer("wlb", 1, callbacks=[stops], default_root_dir=home)
    with pytest.raises(SIGTERMException):
        run.fit(made := module(SMALL), documents := data(SMALL))
    options = {"num_training": 3, "early_stop_threshold": None, "update_attr": False}
    return len(Tuner(run).lr_find(made, documents, **options).results["lr"])


def test_a_search_is_not_ended_by_a_signal_that_was_obeyed(tmp_path: Path) -> None:
    assert run_ranks(stopped, 1, tmp_path, process_group=False) == [3]


def test_a_function_of_the_users_is_none_of_lightnings_by_its_name():
    def _lr_find() -> bool:
        return called_by("_lr_find")

    assert not _lr_find()
