"""Calls that wait for one exchange and post the next, made in order beside a step's own thread.

Over two hops a rank must have received what it hands on, and its step must not stand still
meanwhile. Under gloo a wait stops the thread that waits, so a thread of its own makes these calls.
Under NCCL a wait only lets a stream of the device wait, so they are made at once, on a stream of
their own.

An exception of a call is raised where its result is asked for, and no later call is made. By then
the step's thread may wait for a rank that itself waits for what would have been sent: so the
watchdog is told as well (:mod:`.whereabouts`), which lets all ranks end.

Cost: one thread as long as a :class:`.Relay` lives; it takes the interpreter's lock while it copies
pieces. Not run on CUDA.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from lightning_wlb.supervision.progress import HERE

_T = TypeVar("_T")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Relay:
    """Makes calls in the order in which they are given.

    Args:
        device: whose streams wait for exchanges, so that no thread has to; None: a thread waits.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._last: Future[Any] | None = None
        if self._stream is None:
            self._jobs: _Jobs = SimpleQueue()
            weakref.finalize(self, self._jobs.put, None)
            # A daemon, since a process must be able to end while its thread waits. The executors of
            # concurrent.futures are waited for.
            threading.Thread(
                target=_work, args=(self._jobs,), name="wlb-relay", daemon=True
            ).start()

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """Make a call, without gradients, once all earlier ones have been made."""
        future: Future[_T] = Future()
        if self._stream is None:
            self._jobs.put((future, job))
        else:
            with torch.cuda.stream(self._stream), torch.no_grad():
                future.set_result(job())
        self._last = future
        return future

    def settle(self) -> None:
        """Wait until all calls have been made, so that this thread may use their process groups."""
        if self._last is not None:
            self._last.result()


def done(value: _T) -> Future[_T]:
    """The result of a call that needed no relay."""
    future: Future[_T] = Future()
    future.set_result(value)
    return future


def _work(jobs: _Jobs) -> None:
    """Make calls until the relay is gone."""
    failed: BaseException | None = None
    while (given := jobs.get()) is not None:
        future, job = given
        try:
            if failed is not None:
                raise failed
            with torch.no_grad():
                future.set_result(job())
        except BaseException as error:
            if failed is None:
                HERE.failed = f"{type(error).__name__}: {error}"
            failed = error
            future.set_exception(error)
        del given, future, job  # or what they hold would live until the next call
