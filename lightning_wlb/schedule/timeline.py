"""A timeline: when each action of a step ran and how long it computed. Plain data.

The executor measures timelines and callbacks reduce them to imbalance degrees. Measured and
predicted actions are both shown as spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_wlb.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Timing:
    """One action as it ran on one rank; all times in seconds.

    Args:
        action: what ran.
        begin: when it began, from the start of the rank's step (receives included before it).
        wall: elapsed time of the computation: without waits for the neighbouring stages, with
            waits inside it (collectives of context and tensor parallelism).
        compute: time the rank itself worked: its own CPU time on CPU, ``wall`` on a GPU.
        attention: the part of ``compute`` spent in attention kernels, collectives excluded.
    """

    action: Action
    begin: float
    wall: float
    compute: float
    attention: float


class Span(NamedTuple):
    """One action on a rank's time axis; integer nanoseconds from the start of the step."""

    action: Action
    begin_ns: int
    end_ns: int


def spans_of(timings: Iterable[Timing]) -> tuple[Span, ...]:
    """Measured timings as spans, ``wall`` wide, rounded to whole nanoseconds.

    Every rank counts from the start of its own step, so spans of several ranks are aligned only as
    well as the ranks were at that moment.
    """
    return tuple(
        Span(timing.action, round(timing.begin * 1e9), round((timing.begin + timing.wall) * 1e9))
        for timing in timings
    )
