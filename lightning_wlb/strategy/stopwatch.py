"""Times each action of a step where it runs: on the CPU by the rank's own clock, on CUDA by events.

On a CPU with one thread, ``compute`` is the thread's own CPU time. It leaves out the waits inside
collectives, and it stays right when several ranks share a core, where wall time measures the
neighbours. On CUDA, events are recorded on the stream and read once at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.timeline import Timing


class Stopwatch(Protocol):
    """Collects one step's timings. ``start``/``stop`` bracket attention kernels."""

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Context manager around one action's computation."""

    def start(self) -> None:
        """An attention kernel starts."""

    def stop(self) -> None:
        """The attention kernel that started last is done."""

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CUDAStopwatch() if device.type == "cuda" else CPUStopwatch()


class CPUStopwatch:
    """Reads clocks at once. Backward runs in the calling thread on CPU, so its time counts."""

    def __init__(self) -> None:
        self._timings: list[Timing] = []
        self._origin = 0.0
        self._attention = 0.0
        self._attention_start = 0.0
        self._clock = time.perf_counter

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""
        self._timings = []
        self._origin = time.perf_counter()
        # A thread pool's work is not in the caller's CPU time.
        single = torch.get_num_threads() == 1
        self._clock = time.thread_time if single else time.perf_counter

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action's computation."""
        self._attention = 0.0
        wall, own = time.perf_counter(), self._clock()
        yield
        self._timings.append(
            Timing(
                action=action,
                begin=wall - self._origin,
                wall=time.perf_counter() - wall,
                compute=self._clock() - own,
                attention=self._attention,
            )
        )

    def start(self) -> None:
        """An attention kernel starts."""
        self._attention_start = self._clock()

    def stop(self) -> None:
        """The attention kernel that started last is done."""
        self._attention += self._clock() - self._attention_start

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""
        return self._timings


class CUDAStopwatch:
    """Records CUDA events; :meth:`timings` waits for the device once."""

    def __init__(self) -> None:
        self._origin: torch.cuda.Event | None = None
        self._actions: list[tuple[Action, torch.cuda.Event, torch.cuda.Event, int, int]] = []
        self._kernels: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open: torch.cuda.Event | None = None

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""
        self._actions, self._kernels = [], []
        self._origin = self._now()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action's computation."""
        begin, kernels = self._now(), len(self._kernels)
        yield
        self._actions.append((action, begin, self._now(), kernels, len(self._kernels)))

    def start(self) -> None:
        """An attention kernel starts."""
        self._open = self._now()

    def stop(self) -> None:
        """The attention kernel that started last is done."""
        assert self._open is not None
        self._kernels.append((self._open, self._now()))

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""
        torch.cuda.synchronize()
        assert self._origin is not None
        result = []
        for action, begin, end, first, last in self._actions:
            wall = begin.elapsed_time(end) / 1000  # elapsed_time is in milliseconds
            attention = sum(a.elapsed_time(b) for a, b in self._kernels[first:last]) / 1000
            start = self._origin.elapsed_time(begin) / 1000
            result.append(Timing(action, start, wall, wall, attention))
        return result
