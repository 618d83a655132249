"""A signal to one rank or to all processes ends all ranks at the end of the same step, and soon."""

import multiprocessing
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.supervision import signals
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, Recorder, data, module, trainer

CASE = SMALL
MESH = (1, 2, 1, 1)
JOB = "4711"
# What Slurm sets in every task.
SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": JOB,
    "SLURM_JOB_NAME": "train",
    "SLURM_NODELIST": "127.0.0.1",
}


class Sends(L.Callback):
    """Signals its own process and its loader workers, as Slurm does, in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int, validating: bool = False) -> None:
        self.number, self.step, self.validating = number, step, validating

    def _send(self) -> None:
        os.kill(os.getpid(), self.number)
        for child in multiprocessing.active_children():
            os.kill(child.pid, self.number)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if not self.validating and trainer.global_step == self.step:
            self._send()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, *_: Any) -> None:
        if self.validating and trainer.global_step == self.step and batch_idx == 0:
            self._send()


class Evaluated(L.Callback):
    """Counts the batches of evaluations."""

    def __init__(self) -> None:
        self.batches = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches += 1


class Stalls(InMemoryDocuments):
    """Documents that cannot be read any more once the file is there."""

    def __init__(self, of: InMemoryDocuments, flag: Path) -> None:
        self.__dict__ = of.__dict__ | {"flag": flag}

    def read(self, document: int, start: int, stop: int) -> Any:
        while self.flag.exists():
            time.sleep(0.1)
        return super().read(document, start, stop)


class Stops(L.Callback):
    """Stops the reading after two steps, and signals the rank a while later."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.flag.touch()
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()


def run(
    rank: int, folder: Path, mesh, callbacks=(), stalls: Path | None = None, **options
) -> tuple[L.Trainer, Recorder, bool]:
    """A run of six steps; whether a signal ended it."""
    recorder = Recorder()
    runner = trainer(
        WLBStrategy(*mesh),
        2,
        callbacks=[recorder, *callbacks],
        default_root_dir=folder,
        max_steps=6,
        max_epochs=-1,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **options,
    )
    documents = data(CASE, validation_documents=5, num_workers=1)
    if stalls is not None:
        documents.documents = Stalls(documents.documents, stalls)
        documents.num_workers = 0
    try:
        runner.fit(module(CASE), documents)
    except SystemExit as end:  # SIGTERMException is one
        if end.code != (None if isinstance(end, SIGTERMException) else 1):
            raise
        return runner, recorder, True
    return runner, recorder, False


def requeued(rank: int, folder: Path, mesh) -> dict[str, Any]:
    """The requeue signal comes to rank 1 only; then the job starts again."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.update(SLURM, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    _, unbroken, _ = run(rank, folder / "unbroken", mesh)
    callbacks = [Sends(signal.SIGUSR1, step=2)] if rank == 1 else []
    first, before, ended = run(rank, folder, mesh, callbacks)
    assert isinstance(first.strategy.cluster_environment, SLURMEnvironment)
    assert ended
    assert callable(signal.getsignal(signal.SIGUSR1)), "it must not end the job after the run"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "as it was before the run"
    second, after, ended = run(rank, folder, mesh)
    assert not ended
    evaluations = {
        number: evaluate(rank, folder / "evaluated", mesh, number)
        for number in (None, signal.SIGUSR1, signal.SIGTERM)
    }
    return {
        "evaluations": evaluations,
        "steps": (first.global_step, second.global_step, early_and_late(folder / "early", mesh)),
        "losses": before.losses + after.losses,
        "unbroken": unbroken.losses,
    }


def evaluate(rank: int, folder: Path, mesh, number: signal.Signals | None) -> tuple[int, bool]:
    """Validation alone, a signal to rank 1 in its first batch: batches run; whether it ended."""
    counter = Evaluated()
    sends = [Sends(number, 0, validating=True)] if rank == 1 and number else []
    options = {"callbacks": [counter, *sends], "default_root_dir": folder}
    documents = data(CASE, validation_documents=10)
    try:
        trainer(WLBStrategy(*mesh), 2, **options).validate(module(CASE), documents, verbose=False)
    except SIGTERMException:
        return counter.batches, True
    return counter.batches, False


def requeues(folder: Path) -> Path:
    """A scontrol that writes down what it is called with."""
    written, script = folder / "calls", folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {written}\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return written


def test_a_requeued_job_goes_on_where_it_was(tmp_path):
    calls = requeues(tmp_path)
    (tmp_path / "convert_ckpt_to_hf.py").touch()  # Lightning asks each name for a number
    for result in run_ranks(requeued, 2, tmp_path, MESH, process_group=False):
        assert result["steps"] == (3, 6, 1)
        assert result["losses"] == result["unbroken"]
        whole, ended = result["evaluations"][None]
        assert (whole > 1, ended) == (True, False)
        # Nothing to save, so nothing to requeue: it goes on.
        assert result["evaluations"][signal.SIGUSR1] == (whole, False)
        assert result["evaluations"][signal.SIGTERM] == (1, True)
    assert not list(tmp_path.glob("evaluated/*"))
    assert calls.read_text() == f"requeue {JOB}\n" * 2
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt" / "meta.pt")["global_step"] == 3


def terminated(rank: int, folder: Path, mesh) -> dict[str, Any]:
    """A signal comes in a step, a validation, the loader: to rank 1 with its worker, or to all."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process that a user starts
    signals.LOADER_SECONDS = 1.0
    results: dict[str, Any] = {}
    for name, callback, to in (
        ("training", Sends(signal.SIGTERM, 2), (0, 1)),
        ("validating", Sends(signal.SIGTERM, 2, validating=True), (1,)),
        ("interrupted", Sends(signal.SIGINT, 2), (0, 1)),
        ("waiting", Stops(folder / "flag"), (1,)),
    ):
        home = folder / name
        keeper = ModelCheckpoint(home, save_on_exception=True, save_top_k=0)
        options: dict[str, Any] = {"limit_val_batches": 0}
        if name == "validating":
            options = {"val_check_interval": 2}
        if name == "waiting":
            options["stalls"] = folder / "flag" if rank in to else folder / "none"
        runner, _, ended = run(
            rank, home, mesh, [keeper, *([callback] if rank in to else [])], **options
        )
        assert ended
        assert signals.NOTICES.mine == 0, "a later run begins without"
        results[name] = (runner.global_step, [path.name for path in home.glob("*.ckpt")])
    return results


def test_a_signal_ends_all_ranks_together_and_they_save(tmp_path):
    for result in run_ranks(terminated, 2, tmp_path, MESH, process_group=False):
        steps = {name: step for name, (step, _) in result.items()}
        assert steps == {"training": 3, "validating": 2, "interrupted": 3, "waiting": 3}
        for _, saved in result.values():
            assert len(saved) == 1, "every rank was there to save"


def early_and_late(folder: Path, mesh) -> int:
    """The requeue signal comes before the run has begun, and when it is over."""
    options = {"default_root_dir": folder, "max_steps": 6, "max_epochs": -1}
    runner = trainer(WLBStrategy(*mesh), 2, **options)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SIGTERMException):
        runner.fit(module(CASE), data(CASE))
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
    return runner.global_step


def test_a_requeue_signal_that_was_blocked_while_a_rank_imported_is_noted():
    before = signal.getsignal(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        # Blocked in this thread only, where a launcher blocks it in all that will be.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        signals.heed_requeue(SLURMEnvironment())
        assert signals.NOTICES.mine == signals.REQUEUE
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signals.NOTICES.obeyed()
