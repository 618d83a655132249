"""Times repeated calls on a device, without the host's share.

On a CPU times are one thread's own CPU time, or with more threads wall-clock time.

On CUDA the host queues kernels, and a short kernel takes longer to queue than to run: events around
a single call on an idle device measure the host. So the device first gets a kernel that does
nothing for a while (``torch.cuda._sleep``), after which the host queues an event, several calls and
another event. The time between the events, divided by the number of calls, is the device's alone,
provided that the device is still asleep when everything is queued. If it is not, the sample is
dropped, and all later sleeps are twice as long.

Cost: a sleep of half a millisecond for each sample, up to 70 ms if the host is slow. Do not use it
for calls that wait for the device: no sleep is long enough for those, and a sample with the longest
sleep counts as it is. The CUDA half has not been run by this project.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_wlb.profiling.action_stopwatch import clock_of

FIRST_SLEEP = 2**20
LONGEST_SLEEP = 2**27
"""Cycles of the shortest and longest sleep: half a millisecond and 67 ms at 2 GHz."""

INTERVAL = 1e-3
"""Least seconds between two events, so that their resolution of a microsecond hardly counts."""

MOST_CALLS = 20
"""Most calls between two events: some dozens of kernels, of which a queue holds a thousand."""


@dataclass
class Held:
    """The host's time to queue work, which :meth:`.CallTimer.held` kept the device from running."""

    seconds: float = 0.0  #: 0 if the host does the work itself, or has waited for the device
    ahead: bool = True  #: whether the device had not begun when all was queued, or slept longest


class CallTimer:
    """Seconds of calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._cuda = device.type == "cuda"
        self._cycles = FIRST_SLEEP

    @contextmanager
    def held(self) -> Iterator[Held]:
        """A context in which the host queues work before the device runs it.

        On CUDA the device sleeps first, longer each time this was too short. A CPU queues nothing.
        """
        held = Held()
        if not self._cuda:
            yield held
            return
        asleep = torch.cuda.Event()
        torch.cuda._sleep(self._cycles)
        asleep.record()
        start = time.perf_counter()
        yield held
        seconds = time.perf_counter() - start
        if not asleep.query():
            held.seconds = seconds
        elif self._cycles < LONGEST_SLEEP:
            held.ahead = False
            self._cycles *= 2

    def seconds(self, call: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
        """Mean seconds of ``times`` calls, and the result of the last one."""
        while True:
            with self.held() as held:
                begin = self._clock.now()
                for _ in range(times):
                    result = call()
                end = self._clock.now()
            self._clock.wait()
            if held.ahead:
                return self._clock.compute(begin, end) / times, result

    def times(self, seconds: float) -> int:
        """The number of calls, of so many seconds each, that make a sample.

        On CUDA as many as fill :data:`INTERVAL`, up to :data:`MOST_CALLS`; on a CPU one.
        """
        if not self._cuda:
            return 1
        return max(1, min(math.ceil(INTERVAL / max(seconds, 1e-6)), MOST_CALLS))

    def medians(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], repeats: int
    ) -> np.ndarray:
        """Median seconds [forward, backward]; more samples of short calls, fewer of long ones.

        ``backward`` is called with a result of ``forward``, several times with the same one.
        """
        # On CUDA the second call says how long a call takes without the setup of the first.
        warm_ups = 2 if self._cuda else 1
        samples: list[tuple[float, float]] = []
        times, spent = (1, 1), 0.0
        while not _enough(len(samples) - warm_ups, spent, repeats):
            there, out = self.seconds(forward, times[0])
            back, _ = self.seconds(partial(backward, out), times[1])
            samples.append((there, back))
            spent += times[0] * there + times[1] * back
            if len(samples) == warm_ups:
                times = self.times(there), self.times(back)
        return np.asarray(np.median(np.array(samples[warm_ups:]), axis=0))


def _enough(samples: int, seconds: float, repeats: int) -> bool:
    """Whether these samples are enough: ``repeats``, more of short calls, fewer of long ones."""
    if seconds > 0.5:
        return samples >= min(3, repeats)
    return samples >= repeats and (seconds > 0.01 or samples >= 20)
