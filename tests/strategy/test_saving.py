"""Saves in the background, saves that fail, and what is removed after them."""

import errno
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.checkpoints import manifest, sharded, storage
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
    watch = options.pop("watch", None) or Watch()
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


def full_disk(at: str) -> Any:
    """Opening a file of a checkpoint of that name fails."""
    create = storage._Files.create_stream

    def fails(files: Any, path: Any, mode: str) -> Any:
        if at in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(files, path, mode)

    return patch.object(storage._Files, "create_stream", fails)


def failures(rank: int, scratch: Path) -> list[tuple[str, int, str]]:
    """How runs end in which rank 1 cannot write at step 2: (kind, steps, text)."""
    results = []
    for background in (False, True):
        for reaction in ("raise", "warn"):
            folder = scratch / f"{reaction}-{background}"
            options = {"async_save": background, "on_save_failure": reaction}
            with full_disk("step=2.ckpt" if rank == 1 else "nothing"), warnings.catch_warnings(
                record=True
            ) as said:
                warnings.simplefilter("always")
                watch, text = Watch(), ""
                try:
                    fit(folder, watch=watch, **options)
                except OSError as error:
                    text = str(error)
                text += "".join(str(each.message) for each in said if "not saved" in str(each.message))
            left = sorted(path.name for path in folder.iterdir())
            results.append((f"{reaction}-{background}", len(watch.busy), text, left))
    return results


def test_a_save_that_fails_on_one_rank(tmp_path):
    zero, one = run_ranks(failures, 2, tmp_path, process_group=False)
    for (kind, steps, text, left), (_, same_steps, other, _) in zip(zero, one, strict=True):
        assert steps == same_steps, (kind, "all ranks end at the same step")
        assert "No space left on device" in text, kind
        if kind.startswith("raise"):
            assert "No space left on device" in other, kind
            assert steps < STEPS, kind
            assert left == ["epoch=0-step=1.ckpt"], kind
        else:
            assert steps == STEPS, kind
            assert "step=2.ckpt was not saved" in text, kind
            assert "The last good one" in text and "step=1.ckpt, is" in text, kind
            assert left == [f"epoch=0-step={STEPS}.ckpt"], (kind, "step 1's is removed in the end")
