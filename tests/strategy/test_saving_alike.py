"""Saves in the background leave what saves that block leave, whoever saves and removes.

The metric is best at step 2, so that the best checkpoint is neither the newest nor the first.
"""

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.pickle_checks import load_state
from lightning_wlb.strategy import checkpointing as saving
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer

BEST = {"monitor": "distance"}
NAMED = {"filename": "same", "every_n_train_steps": 1}
WAYS: dict[str, list[dict[str, Any]]] = {
    # Two for one name at each save, as newest and best; then two that link.
    "newest and best": [{}, BEST],
    "newest, and weights of the best": [{}, {**BEST, "save_weights_only": True}],
    "linked": [{"save_last": "link"}, {**BEST, "save_top_k": 2, "save_last": "link"}],
    "last": [{"save_last": True}, {**BEST, "mode": "max", "save_last": True, "save_top_k": 2}],
    # The step is not in the name: what is removed and what is saved have one.
    "one name": [{**NAMED, **BEST, "save_top_k": 2}, {**NAMED, "save_on_exception": True}],
}


class Hand(L.Callback):
    """Logs the metric, saves and removes by hand, and in the end raises an error, on all ranks."""

    def __init__(self, folder: Path, raises: bool) -> None:
        self.folder, self.raises = folder, raises

    def on_train_batch_end(self, trainer, pl_module, *_: Any) -> None:
        step = trainer.global_step
        pl_module.log("distance", float(abs(step - 2)))
        if step == 3:  # before the saves of others at this step
            trainer.save_checkpoint(self.folder / "epoch=0-step=4.ckpt")
            trainer.save_checkpoint(self.folder / "twice.ckpt")
            trainer.save_checkpoint(self.folder / "twice.ckpt", weights_only=True)
            trainer.save_checkpoint(self.folder / "gone.ckpt")
            trainer.strategy.remove_checkpoint(self.folder / "gone.ckpt")
        if step == 5 and self.raises:
            raise RuntimeError("on purpose")


def left(folder: Path) -> dict[str, Any]:
    """What is there: links, and of each checkpoint checksums of shards and callbacks' states."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            found[path.name] = os.readlink(path), path.exists()
            continue
        files = manifest.read(path).files
        shards = {name: each.crc32 for name, each in files.items() if name.endswith(".distcp")}
        rest = load_state(path / "meta.pt")
        states = str(rest.get("callbacks")).replace(str(folder), "")
        found[path.name] = rest["global_step"], "lr_schedulers" in rest, shards, states
    return found


def fit(folder: Path, keepers: list[dict[str, Any]], background: bool, raises: bool) -> Any:
    write = saving.write

    def slow(*args: Any) -> None:
        time.sleep(0.1)
        write(*args)

    callbacks = [
        ModelCheckpoint(folder, **{"every_n_train_steps": 2} | options) for options in keepers
    ]
    runner = trainer(
        WLBStrategy(1, 2, 1, 1, async_save=background),
        2,
        max_steps=6,
        max_epochs=-1,
        callbacks=[Hand(folder, raises), *callbacks],
        enable_checkpointing=True,
    )
    with patch.object(saving, "write", slow if background else write):
        try:
            runner.fit(module(SMALL), data(SMALL))
        except RuntimeError as error:
            assert str(error) == "on purpose"  # noqa: PT017
    torch.distributed.barrier()  # rank 0 removes
    kept = [Path(each.best_model_path).name for each in callbacks]
    assert not any("_link_checkpoint" in vars(each) for each in callbacks), "as they were before"
    return kept, left(folder)


def everything(rank: int, scratch: Path) -> dict[str, list[Any]]:
    return {
        f"{name}, {raises}": [
            fit(scratch / f"{name}-{raises}-{background}", keepers, background, raises)
            for background in (False, True)
        ]
        for name, keepers in WAYS.items()
        for raises in ((True,) if name in ("last", "one name") else (False,))
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, list[Any]]]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("alike"), process_group=False)


def test_the_same_checkpoints_are_left(results):
    for of_rank in results:
        for name, (blocking, background) in of_rank.items():
            assert background[0] == blocking[0], name
            assert background[1].keys() == blocking[1].keys(), name
            assert background[1] == blocking[1], name


def test_the_best_and_what_a_run_resumes_from_are_left(results):
    for name in ("newest and best", "newest, and weights of the best"):
        for kept, there in results[0][f"{name}, False"]:
            assert kept == ["epoch=0-step=6.ckpt", "epoch=0-step=2-v1.ckpt"]
            assert [there[each][:2] for each in kept] == [(6, True), (2, "weights" not in name)]


def test_a_link_leads_to_what_is_there(results):
    for _, there in results[0]["linked, False"]:
        assert there["last.ckpt"] == ("epoch=0-step=6.ckpt", True)
