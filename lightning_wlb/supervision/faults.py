"""What a rank does after an exception: it reports it, and waits for no rank that is in a step.

Lightning answers an exception with callbacks that save
(``ModelCheckpoint(save_on_exception=True)``). A save is collective: a rank that failed alone would
wait for ranks that wait for it in their step. So before any callback the ranks agree over their
heartbeats (:mod:`.heartbeat`). If all ranks have the exception at the same place (a signal that
they have agreed on, data that all refuse), they save, and print nothing beside it. Otherwise this
rank reports its exception, and takes part in no further collective. Nothing is saved, the last
checkpoint stands, and the exception ends the process; as its connections close, other ranks end.

An exception inside the optimizer's step leaves only some parameters updated. No run may resume from
that, so nothing is saved, even if all ranks raise it. The same holds after :class:`.StateLost`.

Cost: nothing without an exception; with one at most ``heartbeat.PATIENCE`` seconds, or
``heartbeat.AGREED_PATIENCE`` if all ranks have agreed to end.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_wlb.data.loader_workers import live_on_without_parent
from lightning_wlb.distributed.collective_errors import Ranks, text_of
from lightning_wlb.supervision.heartbeat import Connection, HeartbeatServer, heartbeat_seconds
from lightning_wlb.supervision.progress import AFTER, CALLBACKS, OPTIMISING, PROGRESS, REDUCING
from lightning_wlb.supervision.signals import NOTICES
from lightning_wlb.supervision.watchdog import Watchdog, say

EXIT_SECONDS = 30
"""How long a process may take to exit after an exception that only this process has."""

TOLD = 2000
"""Most characters of an error that other ranks repeat."""


class StateLost(RuntimeError):
    """An error of all ranks after which no run may go on from their parameters."""


class Faults(pl.Callback):
    """Watches a run, and handles its exceptions. ``WLBStrategy`` adds it, as the first callback.

    Attributes:
        alone: why this rank may take part in no collective any more; None: it may.
    """

    def __init__(self) -> None:
        self.alone: str | None = None
        self._rank, self._size = 0, 1
        self._server: HeartbeatServer | None = None
        self._watchdog: Watchdog | None = None
        self._held_back: list[ModelCheckpoint] = []  # callbacks kept from saving on an exception

    def begin(self, rank: int, world_size: int, timeout: timedelta) -> None:
        """Watch from now on; collective over all ranks."""
        self.end()
        self._rank, self._size, self.alone = rank, world_size, None
        if world_size == 1:
            return
        seconds = timeout.total_seconds()
        stalled_after = max(min(60.0, seconds / 4), 3 * heartbeat_seconds(world_size))
        address: list[Any] = [None, None]
        if rank == 0:
            token = secrets.token_hex(16)
            with suppress(OSError):
                self._server = HeartbeatServer(
                    world_size, token, stalled_after, seconds, lambda text: say(0, text)
                )
                self._server.start()
                address = [self._server.port, token]
        dist.broadcast_object_list(address, 0)
        link = None
        host = os.environ.get("MASTER_ADDR", "localhost")  # unset where the user has connected them
        with suppress(OSError):
            link = Connection(socket.create_connection((host, address[0]), 20.0))
        reached = Ranks().every(lambda: link is not None)
        if missing := [rank for rank, there in enumerate(reached) if not there]:
            rank_zero_warn(
                f"Ranks {missing[:8]} cannot reach port {address[0]} of rank 0: the run is not"
                " watched, and after an exception nothing is saved. Open all ports between ranks."
            )
            self.end()
            return
        assert link is not None
        self._watchdog = Watchdog(rank, world_size, link, address[1], stalled_after, seconds)
        self._watchdog.start()

    def end(self) -> None:
        """End the watch: the run of this rank is over."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._server is not None:
            if self.alone is None:
                self._server.wait_for_ends()
            self._server.stop()
        self._watchdog = self._server = None
        for callback in self._held_back:
            callback.save_on_exception = True
        self._held_back.clear()
        PROGRESS.begin()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Note that callbacks are next: the Trainer has counted the optimizer's step."""
        PROGRESS.note(CALLBACKS, "its callbacks")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Let this rank outlive its launcher from here on, which may end before it."""
        live_on_without_parent()

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Note that a checkpoint is next."""
        PROGRESS.note(CALLBACKS, "the saving of a checkpoint")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Say what has happened, and whether the ranks can go on together."""
        live_on_without_parent()
        loop = trainer._active_loop
        fetcher = getattr(loop, "_data_fetcher", None)
        if fetcher is not None and fetcher.iterator is None:
            # The loader could not begin: its teardown would raise and hide this exception.
            loop._data_fetcher = None  # type: ignore[union-attr]
        lost = isinstance(exception, StateLost) or PROGRESS.part == OPTIMISING
        if self._size == 1 and not lost:
            return
        error = f"{type(exception).__name__}: {text_of(exception)}".strip()
        asked = isinstance(exception, SIGTERMException | KeyboardInterrupt)
        # All ranks agree at the end of a step or of an evaluated batch (signals.py).
        agreed = asked and not NOTICES.mine and PROGRESS.part in (REDUCING, AFTER)
        together, cause = agreed, "the run is not watched"
        if self._watchdog is not None:
            place = f"{type(exception).__name__} {trainer.global_step} {trainer.state.stage}"
            place += f" {PROGRESS.progress()} {PROGRESS.action} {self._rank if lost else ''}"
            together, cause = self._watchdog.agree(place, f"{PROGRESS}: {_in_short(error)}", agreed)
        if together:
            exception.add_note(f"WLBStrategy: all ranks failed so, {PROGRESS}")
            return
        if not asked:
            say(self._rank, f"failed, {PROGRESS}: {error}")
        if lost:
            cause = f"the parameters are no state to go on from: {_in_short(error)}"
        self.alone = cause
        exception.add_note(f"WLBStrategy: {cause}")
        say(self._rank, f"nothing is saved, the last checkpoint stands, since {cause}")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
                callback.save_on_exception = False
                self._held_back.append(callback)
        if self._size > 1 and threading.current_thread() is threading.main_thread():
            atexit.register(_exit_soon)


@contextmanager
def without_hiding_cause(failed: bool = True) -> Iterator[None]:
    """A context that turns an error into a warning if the run has failed already."""
    try:
        yield
    except Exception as error:
        if not failed:
            raise
        rank_zero_warn(f"The end of the run failed, too: {type(error).__name__}: {text_of(error)}")


def _in_short(error: str) -> str:
    """The first and the last line of an error; a loader worker's error says in the last why."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    ends = lines if len(lines) < 3 else [lines[0], "...", lines[-1]]
    return " ".join(each[: TOLD // 2 - 5] for each in ends)


def _exit_soon() -> None:
    """Let the kernel end this process if its exit hangs, for example on a loader's worker."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_SECONDS)
