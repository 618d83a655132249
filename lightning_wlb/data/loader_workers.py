"""Loader workers that ignore the run's signals and die with their rank, and the wait for them.

A worker is a fork of its rank, and inherits its signal handlers and its connections:

* Slurm and a terminal send signals to *all* processes. Only the rank acts on a signal that ends the
  run, so workers ignore SIGTERM, SIGINT, SIGUSR1 and SIGUSR2. torch ends a stuck worker by SIGTERM;
  :func:`make_endable` turns that into SIGKILL.
* A worker dies with its rank, however the rank ends, except in a read that cannot be interrupted
  (from a hung network disk). So a worker closes the rank's sockets: open, they keep others waiting.

A store must not use in workers a network connection that it has opened before they start.

:data:`WAIT` says that the main thread waits for its loader, a wait that a signal may end.

Cost: a worker looks once at its open files, microseconds each.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any


class WaitEnded(BaseException):
    """Raised to end the wait for a batch because of a signal, as if there were no more batches."""


class LoaderWait:
    """The main thread's wait for its loader."""

    since: float | None = None
    """When the wait began, in seconds of ``time.monotonic``; None: the thread does not wait."""
    holds_batch = False
    """Whether Lightning, which requests one batch ahead, has a batch that it has not run yet."""
    ended = False
    """Whether a signal has ended a wait."""

    def next(self, batches: Any, holds_batch: bool) -> Any:
        """The next batch; None at the end, or if a signal ends the wait."""
        self.holds_batch = holds_batch
        try:
            self.since = time.monotonic()
            return next(batches, None)
        except WaitEnded:
            self.ended = True
            return None
        finally:
            self.since = None


WAIT = LoaderWait()
"""The wait of this process."""


def begin(worker: int = 0) -> None:
    """Prepare this worker process: it ignores signals, dies with its rank, and has no sockets."""
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)
    _drop_connections()
    # Else garbage collection would visit all of the rank's objects, which takes 0.1 s while some
    # step is planned, and copies their pages.
    gc.freeze()


@contextmanager
def safe_path() -> Iterator[None]:
    """Let processes that start in this context import nothing from the working folder.

    Python starts processes that are not forked (fork servers, spawned workers, the resource
    tracker) by ``python -c``, which looks for every module in the working folder first, and would
    run a ``multiprocessing.py`` that somebody has put there.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def make_endable(batches: Any) -> None:
    """Let torch, and Python at exit, kill an iterator's workers, which ignore SIGTERM."""
    for worker in getattr(batches, "_workers", ()):
        popen = weakref.proxy(worker._popen)
        # A bound method would hold the object, with open pipes, until garbage collection.
        worker._popen.terminate = partial(type(worker._popen).kill, popen)


def die_with(parent: int) -> None:
    """Let this process end with its parent, whose process number is given; only on Linux."""
    live_on_without_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has died already


def live_on_without_parent(death_signal: int = 0) -> None:
    """Undo :func:`die_with`: let this process outlive its parent."""
    if sys.platform == "linux":
        from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

        _prctl_pr_set_pdeathsig(death_signal)


def _drop_connections() -> None:
    """Replace the network sockets that were open when this process was forked by /dev/null."""
    if sys.platform != "linux":
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):  # listdir had the folder itself open
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_network(number):
                os.dup2(nothing, number)
    os.close(nothing)


def _is_network(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as copy:
        return copy.family in (socket.AF_INET, socket.AF_INET6)
