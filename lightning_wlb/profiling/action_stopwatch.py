"""Times each action of a step and, within it, the attention kernels.

On a CPU with one thread the compute time of an action is the thread's own CPU time. It leaves out
the waits inside collectives, and it stays right when several ranks share a core, where wall time
measures the neighbours. On CUDA, events are recorded on the stream and read once at the end of the
step.

Cost: two clock readings for each action and each attention kernel.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_wlb.schedule.actions import Action, Timing

Moment = Any
"""A reading of a device's clocks, or a CUDA event."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CUDAStopwatch() if device.type == "cuda" else CPUStopwatch()


class Stopwatch(ABC):
    """Collects one step's timings; ``start`` and ``stop`` bracket attention kernels."""

    def __init__(self) -> None:
        self._origin: Moment = None
        # Of each action its begin and end, and the attention kernels that had run by then.
        self._actions: list[tuple[Action, Moment, Moment, int, int]] = []
        self._kernels: list[tuple[Moment, Moment]] = []
        self._kernel_begin: Moment = None

    @abstractmethod
    def _now(self) -> Moment: ...

    @abstractmethod
    def _wall(self, begin: Moment, end: Moment) -> float:
        """Seconds between two moments."""

    @abstractmethod
    def _compute(self, begin: Moment, end: Moment) -> float:
        """Seconds between two moments in which this rank worked."""

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
        self._kernel_begin = self._now()

    def stop(self) -> None:
        """The attention kernel that started last is done."""
        self._kernels.append((self._kernel_begin, self._now()))

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""
        if self._origin is None:
            return []
        return [
            Timing(
                action=action,
                begin=self._wall(self._origin, begin),
                wall=self._wall(begin, end),
                compute=self._compute(begin, end),
                attention=sum((self._compute(*each) for each in self._kernels[first:last]), 0.0),
            )
            for action, begin, end, first, last in self._actions
        ]


class CPUStopwatch(Stopwatch):
    """Reads the wall clock and the rank's own; backward runs in the calling thread on CPU."""

    def _now(self) -> tuple[float, float]:
        wall = time.perf_counter()
        # A thread pool's work is not in the caller's CPU time.
        return wall, time.thread_time() if torch.get_num_threads() == 1 else wall

    def _wall(self, begin: tuple[float, float], end: tuple[float, float]) -> float:
        return end[0] - begin[0]

    def _compute(self, begin: tuple[float, float], end: tuple[float, float]) -> float:
        return end[1] - begin[1]


class CUDAStopwatch(Stopwatch):
    """Records CUDA events; :meth:`timings` waits for the device once."""

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wall(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000  # elapsed_time is in milliseconds

    _compute = _wall

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""
        torch.cuda.synchronize()
        return super().timings()
