"""Times repeated calls on a device, the host's share left out.

On a CPU with one thread that is the thread's own CPU time, so that a busy machine disturbs it
little; with more threads wall-clock time.

On CUDA the host queues kernels, and a short one takes longer to queue than to run: events around a
single call on an idle device measure the host. So the device is first given a kernel that does
nothing for a while (``torch.cuda._sleep``), behind which the host queues an event, several calls
and another event; what lies between the events, over the number of calls, is the device's alone.
That it was so can be seen: when all is queued the device must still be asleep. If it is not, the
sample is dropped, and all later sleeps are twice as long.

Cost: a sleep of half a millisecond for each sample, up to 70 ms where the host is slow. Not for
calls that wait for the device in their middle: no sleep is long enough for those, and after the
longest a sample counts as it is. The CUDA half has not been run by this project.
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
"""Cycles of the shortest and longest sleep: half a millisecond and 67 ms at 2 GHz, more below."""

INTERVAL = 1e-3
"""Seconds between two events, at least, so that their resolution of a microsecond hardly counts."""

MOST_CALLS = 20
"""Most calls between two events: some dozens of kernels, of which a queue holds a thousand."""


@dataclass
class Held:
    """How long the host took to queue work while :meth:`.CallTimer.held` kept the device from
    running it.
    """

    seconds: float = 0.0  #: of the host; 0 where it does the work itself, or waited for the device
    ahead: bool = True  #: whether the device had not begun by then, or has had the longest sleep


class CallTimer:
    """Seconds of calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._cuda = device.type == "cuda"
        self._cycles = FIRST_SLEEP

    @contextmanager
    def held(self) -> Iterator[Held]:
        """A context in which the host queues work before the device runs it.

        On CUDA the device sleeps before the work, next time longer if it must. On a CPU nothing is
        queued.
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
        """Mean seconds of ``times`` calls, and what the last of them returned."""
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

        On CUDA as many as fill :data:`INTERVAL`, up to :data:`MOST_CALLS`; on a CPU one, whose
        clock is read in less than a microsecond.
        """
        if not self._cuda:
            return 1
        return max(1, min(math.ceil(INTERVAL / max(seconds, 1e-6)), MOST_CALLS))

    def medians(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], repeats: int
    ) -> np.ndarray:
        """Median seconds [2] of each; more samples of short calls, fewer of long ones.

        ``backward`` is called with what ``forward`` returned, several times with the same.
        """
        # The second on CUDA says how long a call takes, without what is set up in the first.
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
