"""Saves in the background, saves that fail, and what is removed after them."""

import errno
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.checkpoints import manifest, sharded
from lightning_wlb.strategy import saving
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer

MESH = (1, 2, 1, 1)
STEPS = 4


class Watch(L.Callback):
    """Notes at the end of each step whether a save is under way."""

    def __init__(self) -> None:
        self.busy: list[bool] = []
        self.warned: list[str] = []

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        self.busy.append(trainer.strategy._jobs.busy)


def fit(folder: Path, mesh=MESH, every: int = 1, **options: Any) -> tuple[L.Trainer, Watch]:
    keeper = {
        name: options.pop(name) for name in ("save_top_k", "save_last") if name in options
    }
    watch = Watch()
    runner = trainer(
        WLBStrategy(*mesh, **options),
        2,
        max_steps=STEPS,
        max_epochs=-1,
        # ModelCheckpoint comes last: the watch sees the saves of the step before.
        callbacks=[watch, ModelCheckpoint(folder, every_n_train_steps=every, **keeper)],
        enable_checkpointing=True,
    )
    runner.fit(module(SMALL), data(SMALL))
    return runner, watch


def slowly(write: Any, seconds: float) -> Any:
    def slow(*args: Any) -> None:
        time.sleep(seconds)
        write(*args)

    return slow


def shards(folder: Path) -> dict[str, dict[str, str]]:
    """Of every checkpoint, the hashes of the shards: weights and optimizer state."""
    return {
        path.name: {
            name: file.sha256
            for name, file in manifest.read(path).files.items()
            if name.endswith(".distcp")
        }
        for path in folder.iterdir()
    }


def both_ways(rank: int, scratch: Path) -> None:
    fit(scratch / "blocking", save_top_k=-1)
    with patch.object(sharded, "write", slowly(sharded.write, 0.3)):
        _, watch = fit(scratch / "background", save_top_k=-1, async_save=True)
        # Each step's save is written during the next; one a step with a step's copy kept.
        assert watch.busy == [False, True, True, True]
        _, watch = fit(scratch / "pruned", save_top_k=1, save_last=True, async_save=True)
        assert any(watch.busy)


def test_what_is_saved_in_the_background_is_the_state_of_its_step(tmp_path):
    run_ranks(both_ways, 2, tmp_path, process_group=False)
    blocking, background = shards(tmp_path / "blocking"), shards(tmp_path / "background")
    assert len(blocking) == STEPS
    assert len({str(each) for each in blocking.values()}) == STEPS, "steps differ"
    assert background == blocking
    assert sorted(shards(tmp_path / "pruned")) == [f"epoch=0-step={STEPS}.ckpt", "last.ckpt"]


def main() -> None:
    pass
