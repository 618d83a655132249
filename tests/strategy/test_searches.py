"""What saves and goes back before the first step: a checkpoint, searches for a learning rate.

On two ranks, compared with a run that does neither.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner

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
