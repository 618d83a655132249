"""Saves in the background and saves that fail, what is removed then, what is resumed from."""

import errno
import hashlib
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_wlb.checkpoints import atomic_folders, writing
from lightning_wlb.checkpoints.manifest import Damaged
from lightning_wlb.checkpoints.pickle_checks import load_state
from lightning_wlb.strategy import checkpointing as saving
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer

MESH = (1, 2, 1, 1)
STEPS = 4


class Watch(L.Callback):
    """Notes at the end of each step whether a save is under way."""

    def __init__(self) -> None:
        self.busy: list[bool] = []

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        self.busy.append(trainer.strategy.checkpoints._jobs.busy)


def fit(
    folder: Path, steps: int = STEPS, watch: Any = None, resume: Any = None, **options: Any
) -> tuple[L.Trainer, Watch]:
    """A run that saves at every step."""
    keeper = {name: options.pop(name) for name in ("save_top_k", "save_last") if name in options}
    watch = watch or Watch()
    runner = trainer(
        WLBStrategy(*MESH, **options),
        2,
        max_steps=steps,
        max_epochs=-1,
        # ModelCheckpoint comes last: the watch sees the saves of the step before.
        callbacks=[watch, ModelCheckpoint(folder, every_n_train_steps=1, **keeper)],
        enable_checkpointing=True,
    )
    runner.fit(module(SMALL), data(SMALL), ckpt_path=resume)
    return runner, watch


def slowly(write: Any) -> Any:
    def slow(*args: Any) -> None:
        time.sleep(0.15)
        write(*args)

    return slow


def full_disk(at: str) -> Any:
    """Opening a file of a checkpoint of that name fails."""
    create = writing._NamingFiles.create_stream

    def fails(files: Any, path: Any, mode: str) -> Any:
        if at in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(files, path, mode)

    return patch.object(writing._NamingFiles, "create_stream", fails)


def both_ways(scratch: Path) -> list[bool]:
    fit(scratch / "blocking", save_top_k=-1)
    with patch.object(saving, "write", slowly(saving.write)):
        _, watch = fit(scratch / "background", save_top_k=-1, async_save=True)
    return watch.busy


def failures(rank: int, scratch: Path) -> dict[str, tuple[int, str, list[str]]]:
    """How runs end in which rank 1 cannot write at step 2: steps, what was said, what is left."""
    results = {}
    for name, background in (("blocking", False), ("background", True)):
        folder, watch, said = scratch / f"fails-{name}", Watch(), ""
        with (
            full_disk("step=2.ckpt" if rank == 1 else "nothing"),
            warnings.catch_warnings(record=True) as shown,
        ):
            warnings.simplefilter("always")
            try:
                fit(folder, 7, watch, async_save=background, save_last=True)
            except OSError as error:
                said = str(error)
        said += "".join(str(each.message) for each in shown)
        left = sorted(path.name for path in folder.iterdir())
        results[name] = len(watch.busy), said, left
    return results


def resumed(rank: int, folder: Path) -> list[tuple[str, int]]:
    """After the newest of four checkpoints is damaged: the one that was taken, steps since."""
    if rank == 0:
        shard = folder / "epoch=0-step=4.ckpt" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    results = []
    for asked in (folder, "last"):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            runner, watch = fit(folder, 5, resume=asked, save_top_k=0)
        assert Path(runner.ckpt_path).name == "epoch=0-step=3.ckpt"
        said = "".join(str(each.message) for each in shown if "Going on from" in str(each.message))
        results.append((said, len(watch.busy)))
    with pytest.raises(Damaged, match="content of __1_0"):
        fit(folder, 5, resume=folder / "epoch=0-step=4.ckpt")
    with pytest.raises(MisconfigurationException, match="got memory://bucket"):
        fit("memory://bucket")  # type: ignore[arg-type]  # before the first step
    return results


def seen_by_one(rank: int, scratch: Path) -> list[str]:
    """What is said where one rank does not see a folder: to go on from, or of new checkpoints."""
    said = []
    for blind in (0, 1):
        home = scratch / ("nowhere" if rank == blind else "blocking")
        for each, path in ((None, "last"), (OnExceptionCheckpoint(home, "epoch=0-step=4"), None)):
            with pytest.raises(MisconfigurationException) as refused:
                fit(home, 5, each, path)
            said.append(str(refused.value))
    watch = Watch()
    with (
        patch.object(atomic_folders, "wait_for", lambda *_: rank == 0),
        pytest.raises(ValueError, match="Checkpoints go to a file system that all nodes share"),
    ):
        fit(scratch / "private", 5, watch)
    assert watch.busy == [], "before the first step"
    return said


def everything(rank: int, scratch: Path) -> tuple[list, dict, dict, list]:
    fit(scratch / "linked" / "anew", 2, async_save=True, save_top_k=-1, save_last="link")
    assert (scratch / "linked" / "anew" / "last.ckpt").resolve().name == "epoch=0-step=2.ckpt"
    busy = both_ways(scratch)
    for index, said in enumerate(seen_by_one(rank, scratch)):
        assert f"blocking/epoch=0-step=4.ckpt, which rank {index // 2} cannot see" in said
    hashes = {each: shards(scratch / each) for each in ("blocking", "background")}
    return busy, hashes, failures(rank, scratch), resumed(rank, scratch / "background")


def shards(folder: Path) -> dict[str, dict[str, str]]:
    """Of every checkpoint, the hashes of the shards: weights and optimizer state."""
    found: dict[str, dict[str, str]] = {}
    for path in folder.glob("*/*.distcp"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found.setdefault(path.parent.name, {})[path.name] = digest
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[tuple[list, dict, dict, list]]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("saving"), process_group=False)


def test_what_is_saved_in_the_background_is_the_state_of_its_step(results):
    for busy, hashes, _, _ in results:
        assert busy == [False, True, True, True], "saves are written during steps"
        blocking = hashes["blocking"]
        assert len({str(each) for each in blocking.values()}) == STEPS, "steps differ"
        assert hashes["background"] == blocking


@pytest.mark.parametrize("way", ["blocking", "background"])
def test_a_save_that_fails_on_one_rank_ends_the_run_on_all(results, way):
    zero, one = (failures[way] for _, _, failures, _ in results)
    steps, said, left = zero
    assert one[0] == steps < 7, "all ranks end at the same step"
    for text in (said, one[1]):
        assert "step=2.ckpt was not saved" in text
        assert "No space left on device" in text
    assert left, "an earlier one, or a later"
    assert not {"epoch=0-step=2.ckpt", ".partial"} & set(left)


def test_the_newest_that_is_not_damaged_is_resumed_from(results):
    for rank, (*_, resumed) in enumerate(results):
        for said, steps in resumed:
            assert steps == 2, "from 3 to 5"
            if rank == 0:
                assert "step=4.ckpt is damaged: the content of __1_0.distcp" in said
                assert "Going on from" in said
                assert "step=3.ckpt, the newest" in said


class Averages(L.Callback):
    """Puts averages in the place of weights, as callbacks for other strategies do."""

    key = "state_dict"

    def on_save_checkpoint(self, trainer, pl_module, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.key] = {"model.head.norm.weight": torch.ones(1)}


def averaging(rank: int, folder: Path) -> tuple[str, bool, Any]:
    callback = Averages()
    runner = trainer(WLBStrategy(), 1, max_steps=1, callbacks=[callback])
    runner.fit(module(SMALL), data(SMALL))
    with pytest.raises(MisconfigurationException) as error:
        runner.save_checkpoint(folder / "a.ckpt")
    callback.key = "ema"
    runner.save_checkpoint(folder / "b.ckpt")
    return str(error.value), (folder / "a.ckpt").exists(), load_state(folder / "b.ckpt/meta.pt")


def test_weights_that_a_hook_puts_in_place_of_the_models_are_not_dropped(tmp_path):
    ((said, saved, rest),) = run_ranks(averaging, 1, tmp_path, process_group=False)
    assert "under a key of their own, as checkpoint['ema']" in said
    assert not saved
    assert torch.equal(rest["ema"]["model.head.norm.weight"], torch.ones(1))


def test_lightning_says_saved_only_of_what_is_there(tmp_path, caplog):
    saving.Checkpointer(async_save=False)
    (tmp_path / "a.ckpt").mkdir()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        for name in ("a.ckpt", "b.ckpt"):
            rank_zero_info(
                f"An Exit was raised with message: , saved checkpoint to {tmp_path / name}"
            )
        rank_zero_info("another line")
    assert [each.getMessage()[-6:] for each in caplog.records] == ["a.ckpt", "r line"]
