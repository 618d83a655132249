"""No hang: a rank that fails or dies ends the run on every rank, with the cause, soon."""

import math
import os
import pickle
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint

from benchmarks.ranks import start_ranks
from lightning_wlb.strategy import resuming
from lightning_wlb.strategy.resuming import candidates
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.supervision import heartbeat
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer

LIMIT = 60.0  # seconds
SAID = "on one rank only"


class Fails(L.Callback):
    """Ends its process without a word, as a machine that fails does, or raises."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 2 and self.hook == "step":
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 2 and self.hook in ("raises", "all raise"):
            raise ZeroDivisionError(SAID)
        if batch_idx == 2 and self.hook == "leaves":
            dist.destroy_process_group()
            with pytest.raises(RuntimeError, match="has destroyed their process group"):
                trainer.save_checkpoint(Path(trainer.checkpoint_callback.dirpath, "own.ckpt"))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 1 and self.hook == "optimizer":
            os._exit(1)
        if trainer.global_step == 1 and self.hook == "parameters have moved":
            optimizer.register_step_post_hook(raises)

    def on_validation_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == 2 and self.hook == "validation raises":
            raise ZeroDivisionError(SAID)


def raises(*_: object, **__: object) -> None:
    raise ZeroDivisionError(SAID)


def fit(rank: int, mesh: tuple[int, ...], victims: set[int], hook: str, folder: Path | None) -> int:
    heartbeat.PATIENCE = 1.0
    sys.stderr = open(f"{folder}/{rank}.err", "w") if folder else sys.stderr  # noqa: SIM115
    callbacks: list[L.Callback] = [Fails(hook)] if rank in victims else []
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_on_exception=True, save_top_k=0))
        if hook == "parameters have moved":
            callbacks.append(OnExceptionCheckpoint(folder, "another"))
    runner = trainer(
        WLBStrategy(*mesh),
        math.prod(mesh),
        max_steps=50,
        max_epochs=-1,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        val_check_interval=2,
    )
    runner.fit(module(SMALL), data(SMALL, validation_documents=5))
    return runner.global_step


def outcomes(function, world_size: int, *args) -> tuple[list[tuple[bool, str] | None], float]:
    """What each rank ended with, None for one that died, and the seconds that it took."""
    processes, pipes = start_ranks(function, world_size, *args, timeout=LIMIT)
    begin = time.monotonic()
    results: list[tuple[bool, str] | None] = []
    try:
        for rank, pipe in enumerate(pipes):
            left = begin + LIMIT - time.monotonic()
            assert pipe.poll(max(left, 0)), f"rank {rank} still runs after {LIMIT:g} s"
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                results.append(None)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results, time.monotonic() - begin


@pytest.mark.parametrize(
    ("mesh", "hook", "victim"),
    [
        ((2, 1, 1, 1), "optimizer", 1),
        ((1, 2, 1, 1), "step", 0),
    ],
)
def test_a_rank_that_dies_ends_the_run_on_the_other(mesh, hook, victim):
    results, _ = outcomes(fit, 2, mesh, {victim}, hook, None)
    assert results[victim] is None
    survivor = results[1 - victim]
    assert survivor is not None
    fine, text = survivor
    assert not fine, "it cannot have finished its 50 steps"
    assert f"rank {victim} has died without a word" in text.splitlines()[-1], text


@pytest.mark.parametrize(
    ("hook", "mesh", "victim"),
    [
        ("raises", (1, 2, 1, 1), 0),
        ("validation raises", (1, 2, 1, 1), 1),
    ],
)
def test_a_rank_that_raises_says_so_and_waits_for_nobody(hook, mesh, victim, tmp_path):
    """Although it is to save on an exception, which all ranks must do together."""
    results, _ = outcomes(fit, 2, mesh, {victim}, hook, tmp_path)
    for result in results:
        assert result is not None
        fine, text = result
        assert not fine
        assert re.search(rf"rank {victim} failed, step \d+, .*{SAID}", text.splitlines()[-1]), text
    said = (tmp_path / f"{victim}.err").read_text()
    assert f"[rank {victim}] WLBStrategy: failed, step " in said
    assert f"ZeroDivisionError: {SAID}" in said
    assert "nothing is saved, the last checkpoint stands" in said
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_rank_that_has_left_the_process_group_saves_nothing_of_its_own(tmp_path):
    results, _ = outcomes(fit, 2, (2, 1, 1, 1), {1}, "leaves", tmp_path)
    for result in results:
        assert result is not None
        fine, text = result
        assert not fine
        assert re.search(
            r"rank 1 failed, .*destroyed their process group", text.splitlines()[-1]
        ), text
    assert not list(tmp_path.glob("*.ckpt"))


def test_what_all_ranks_raise_is_saved_together(tmp_path):
    results, _ = outcomes(fit, 2, (2, 1, 1, 1), {0, 1}, "all raise", tmp_path)
    for result in results:
        assert result is not None
        *_, error, where = result[1].splitlines()
        assert f"ZeroDivisionError: {SAID}" in error
        assert where.startswith("WLBStrategy: all ranks failed so, step ")
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def test_parameters_of_which_some_may_have_moved_are_not_saved(tmp_path):
    hook, ranks = "parameters have moved", 2
    results, _ = outcomes(fit, ranks, (ranks, 1, 1, 1), set(range(ranks)), hook, tmp_path)
    for rank, result in enumerate(results):
        assert result is not None
        assert "the parameters are no state to go on from" in result[1].splitlines()[-1]
        said = (tmp_path / f"{rank}.err").read_text()
        assert "nothing is saved" in said
        assert "another.ckpt is not saved, since the parameters are no state" in said
    assert not list(tmp_path.glob("*.ckpt"))


class Asks(L.Callback):
    """Saves in the second step from where it says, at times by a signal's handler."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 1:

            def save(*_: object) -> None:
                trainer.save_checkpoint(Path(trainer.default_root_dir, "asked.ckpt"))

            def ask(*_: object) -> None:
                signal.raise_signal(signal.SIGUSR2)

            signal.signal(signal.SIGUSR2, save)
            if self.where == "optimizer":
                optimizer.register_step_post_hook(ask)
            elif self.where == "thread":
                ThreadPoolExecutor(1).submit(save).result()
            else:
                ask()


def asked_for(rank: int, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """How a run ends by where a save is asked for, and what is saved, on the exception too."""
    found = {}
    for where in ("before", "thread", "optimizer"):
        home = folder / where
        runner = trainer(
            WLBStrategy(),
            1,
            callbacks=[Asks(where), OnExceptionCheckpoint(home, "after")],
            enable_checkpointing=True,
            max_steps=3,
            default_root_dir=home,
        )
        end = ""
        try:
            runner.fit(module(SMALL), data(SMALL))
        except MisconfigurationException as error:
            end = str(error)
        found[where] = end, sorted(path.name for path in home.glob("*.ckpt"))
    return found


def test_half_of_an_optimizers_step_is_not_saved(tmp_path):
    [found] = run_ranks(asked_for, 1, tmp_path, process_group=False)
    assert found["before"] == ("", ["asked.ckpt"])
    for where, saved in (("thread", ["after.ckpt"]), ("optimizer", [])):
        assert "could hold half of a step: it is not saved. Let them set a flag" in found[where][0]
        assert found[where][1] == saved


class SavesEarly(L.Callback):
    """Saves before training, as Lightning's search for a learning rate does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer, pl_module) -> None:
        trainer.save_checkpoint(self.folder / "early.ckpt")


def ends_early(rank: int, folder: Path) -> dict[str, str]:
    """Runs that fail before they train: how each ends, and what was saved of it on the exception.

    Whatever fails while a run ends comes after that.
    """
    runner = trainer(
        WLBStrategy(), 1, callbacks=[ModelCheckpoint(folder)], enable_checkpointing=True
    )
    runner.fit(module(SMALL), data(SMALL))
    (saved,) = folder.glob("*.ckpt")
    (saved / "meta.pt").write_bytes(b"damaged")
    found = {}
    for name in ("launch", "mesh", "callback", "end", "load"):
        strategy = WLBStrategy(*(3, 1, 1, 1) if name == "mesh" else ())
        callbacks = [OnExceptionCheckpoint(folder, "another")]
        if name in ("callback", "end"):
            callbacks.append(LambdaCallback(setup=raises))
        if name == "end":
            strategy.processes.end = strategy.on_exception = raises  # type: ignore[method-assign]
        runner = trainer(strategy, 1, callbacks=callbacks, enable_checkpointing=True)
        with patch.object(resuming, "candidates", raises if name == "launch" else candidates):
            try:
                runner.fit(module(SMALL), data(SMALL), ckpt_path=saved if name == "load" else None)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    try:
        raises()
    except ZeroDivisionError:  # which a script handles by another run: no exception of that one
        strategy = WLBStrategy()
        runner = trainer(strategy, 1, callbacks=[SavesEarly(folder)], max_steps=1)
        runner.fit(module(SMALL), data(SMALL))
    found["early"] = ", ".join(path.name for path in folder.glob("early*"))
    found["saved"] = ", ".join(path.name for path in folder.glob("another*"))
    return found


def test_what_ends_a_run_before_it_trains_is_its_last_line_and_saves_nothing(tmp_path):
    """A checkpoint of initial values would be the newest: the next attempt would begin anew."""
    [found] = run_ranks(ends_early, 1, tmp_path, process_group=False)
    for name in ("launch", "callback", "end"):
        assert found.pop(name) == f"ZeroDivisionError: {SAID}", name
    assert found.pop("mesh").startswith("MisconfigurationException: The mesh data 3 ")
    assert re.match(r"Damaged: .* is damaged: meta\.pt has 7 bytes", found.pop("load"))
    assert found == {"saved": "", "early": "early.ckpt"}
