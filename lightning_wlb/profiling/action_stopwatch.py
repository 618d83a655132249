"""Times each action of a step and, within it, the attention kernels.

On a CPU with one thread the compute time of an action is the thread's own CPU time, without waits
(docs/design.md). On CUDA, events are recorded on the stream and read once at the end of the step.

Cost: two clock readings for each action and each attention kernel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_wlb.schedule.actions import Action, Timing

Moment = Any
"""A reading of a device's clocks, or a CUDA event."""


class CPUClock:
    """The wall clock and the rank's CPU time; on CPU backward runs in the calling thread."""

    def now(self) -> Moment:
        """A reading of both clocks."""
        wall = time.perf_counter()
        # The caller's CPU time does not include the work of a thread pool.
        return wall, time.thread_time() if torch.get_num_threads() == 1 else wall

    def wall(self, begin: Moment, end: Moment) -> float:
        """Seconds between two moments."""
        return float(end[0] - begin[0])

    def compute(self, begin: Moment, end: Moment) -> float:
        """Seconds between two moments in which this rank worked."""
        return float(end[1] - begin[1])

    def wait(self) -> None:
        """Do nothing: a CPU has no queue of work."""


class CUDAClock:
    """Events on the current stream, whose times are known when :meth:`wait` has returned."""

    def now(self) -> Moment:
        """The moment when everything queued so far will have run."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wall(self, begin: Moment, end: Moment) -> float:
        """Seconds between two moments."""
        return float(begin.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds

    compute = wall

    def wait(self) -> None:
        """Wait until the device has done everything queued."""
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> CPUClock | CUDAClock:
    """The clock of a device."""
    return CUDAClock() if device.type == "cuda" else CPUClock()


class Stopwatch:
    """Collects one step's timings; ``start`` and ``stop`` bracket attention kernels."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._origin: Moment = None
        # For each action its begin and end, and the attention kernels that had run by its end.
        self._actions: list[tuple[Action, Moment, Moment, int, int]] = []
        self._kernels: list[tuple[Moment, Moment]] = []
        self._kernel_begin: Moment = None

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""
        self._actions, self._kernels = [], []
        self._origin = self._clock.now()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action's computation."""
        begin, kernels = self._clock.now(), len(self._kernels)
        yield
        self._actions.append((action, begin, self._clock.now(), kernels, len(self._kernels)))

    def start(self) -> None:
        """An attention kernel starts."""
        self._kernel_begin = self._clock.now()

    def stop(self) -> None:
        """The attention kernel that started last is done."""
        self._kernels.append((self._kernel_begin, self._clock.now()))

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran; waits for the device once."""
        if self._origin is None:
            return []
        clock = self._clock
        clock.wait()
        return [
            Timing(
                action=action,
                begin=clock.wall(self._origin, begin),
                wall=clock.wall(begin, end),
                compute=clock.compute(begin, end),
                attention=sum((clock.compute(*each) for each in self._kernels[first:last]), 0.0),
            )
            for action, begin, end, first, last in self._actions
        ]
