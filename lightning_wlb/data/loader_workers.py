"""Loader workers that survive signals to the run and die with their rank, and the wait for them.

A worker is a fork of its rank. It inherits the rank's handlers of signals, and its connections:

* Slurm and a terminal send signals to *all* processes. A signal that ends a run is for the rank to
  obey, so workers ignore SIGTERM, SIGINT, SIGUSR1 and SIGUSR2. torch ends a worker that is stuck by
  SIGTERM; :func:`make_endable` makes that SIGKILL.
* A worker dies with its rank, however the rank ends, except in a read that cannot be interrupted
  (of a hung network disk). So a worker has none of the rank's sockets: they would stay open, and
  the other ranks would wait for a rank that is dead.

A store must not open a network connection before the workers start and use it in them; a fork is no
place for that anyway.

:data:`WAIT` says that the main thread waits for its loader; a signal may end that wait
(``supervision/signals.py``).

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
    """Ends the wait for a batch as if there were no more, where a signal is to be obeyed."""


class LoaderWait:
    """The main thread's wait for its loader."""

    since: float | None = None
    """When the wait began, in seconds of ``time.monotonic``; None: the thread does not wait."""
    holds_batch = False
    """Whether Lightning, which takes one batch ahead, holds one that it has not run yet."""
    ended = False
    """Whether a signal has ended a wait."""

    def next(self, batches: Any, holds_batch: bool) -> Any:
        """The next batch, or None at the end or where a signal ends the wait."""
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
    """Make this process, a worker, fit to live and die with its rank."""
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)
    _drop_connections()
    # Else garbage collection would look through all that the rank has made, for 0.1 s in the midst
    # of planning some step, and by that copy its pages.
    gc.freeze()


@contextmanager
def safe_path() -> Iterator[None]:
    """Let processes that start in this context import nothing from the working folder.

    What is not forked (fork servers, spawned workers, the resource tracker) Python starts by
    ``python -c``, which looks for every module in the working folder first, and so would run a
    ``multiprocessing.py`` that somebody has put there.
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
    """Let torch and Python's exit end an iterator's workers, which ignore SIGTERM, by SIGKILL."""
    for worker in getattr(batches, "_workers", ()):
        popen = weakref.proxy(worker._popen)
        # Not its own method: it would hold itself, and its pipes would stay open until it is
        # found as garbage.
        worker._popen.terminate = partial(type(worker._popen).kill, popen)


def die_with(parent: int) -> None:
    """End this process with its parent, whose process number is given; on Linux only."""
    live_on_without_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before


def live_on_without_parent(death_signal: int = 0) -> None:
    """Let this process outlive its parent again, after :func:`die_with`."""
    if sys.platform == "linux":
        from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

        _prctl_pr_set_pdeathsig(death_signal)


def _drop_connections() -> None:
    """Put /dev/null in place of the network sockets that were open when this process was forked."""
    if sys.platform != "linux":
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):  # the folder itself was open while it was read
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_network(number):
                os.dup2(nothing, number)
    os.close(nothing)


def _is_network(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as copy:
        return copy.family in (socket.AF_INET, socket.AF_INET6)
