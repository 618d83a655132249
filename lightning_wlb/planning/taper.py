"""Micro-batches of a pipeline that grow to the heaviest and shrink after it.

In 1F1B a micro-batch waits on every stage for those around it. The first one fills the pipeline
with nothing to do beside it, and the last one's backward empties it, so both should be small. In
between, a heavy micro-batch costs no waiting where the backwards that run beside its forwards take
as long: a backward costs a little more than twice a forward, so each micro-batch may be about 1.6
times as heavy as the one before it. After the heaviest, its own backward runs beside forwards, of
which few are long enough to hide it, and the following ones may shrink only slowly.

So a long document needs no equals: S + (P - 1)·largest is the time of a pipeline whose largest
micro-batch comes first or last, or whose micro-batches are all alike, and an unlike but well
ordered step beats it. On Generator A, N = 4, P = 4, without delay, it takes 1.71 times the step's
work (``benchmarks/results/packing.md``).

The construction: for three numbers of micro-batches M and six positions of the heaviest, heights of
a profile with the step's total; costly pieces in descending cost to the largest gap to the profile,
the others as a fluid over the gaps; the pipeline's time of each. The best few are then filled piece
by piece and timed again.

Cost: 1.5 ms for 250 pieces. Not for a pipeline of one stage, where order does not matter, nor for
kernels that need large micro-batches: M is at most twice N.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_wlb.planning.pipeline import pipeline_time

_GROWTH = 1.6  # of a micro-batch against the one before it
_BEFORE = 6  # the heaviest has fewer than so many before it
_REFINED = 3  # candidates that are filled piece by piece
_OVERHEAD = 256  # a micro-batch more must save more than this part of an average one


class Job(NamedTuple):
    """What a replica has to do in a step, pieces by descending cost.

    Attributes:
        tokens: of each piece.
        forward: cost of each piece's forward.
        total: cost of each piece's forward and backward, descending.
    """

    tokens: Sequence[int]
    forward: Sequence[int]
    total: Sequence[int]


def taper(job: Job, nominal: int, most: int, cap: int, stages: int) -> tuple[list[list[int]], int]:
    """Group and order the pieces of one replica.

    Args:
        job: its pieces.
        nominal: micro-batches that it would have by tokens, at least 1.
        most: micro-batches to have at most, unless the cap needs more.
        cap: most tokens of a micro-batch, at least those of the longest piece.
        stages: depth of the pipeline.

    Returns:
        Indices of the pieces of each micro-batch, none empty, in the order in which they run; and
        the time of the pipeline over them.
    """
    if not job.total:
        return [], 0
    need = -(-sum(job.tokens) // cap)
    counts = _counts(need, nominal, max(most, need), len(job.total), stages)
    overhead = sum(job.total) // (nominal * _OVERHEAD)
    candidates = []
    for number, heights in enumerate(_profiles(sum(job.total), job.total[0], counts, stages)):
        loads, forwards = _estimate(job, heights)
        backwards = [load - forward for load, forward in zip(loads, forwards, strict=True)]
        time = pipeline_time(forwards, backwards, stages) + overhead * len(heights)
        candidates.append((time, number, heights))
    candidates.sort(key=lambda candidate: candidate[:2])
    best: tuple[int, list[list[int]]] | None = None
    refined = 0
    for _, _, heights in candidates:
        groups = _fill(job, heights, cap)
        if groups is None:
            continue
        time = _time(job, groups, stages) + overhead * len(groups)
        if best is None or time < best[0]:
            best = time, groups
        refined += 1
        if refined == _REFINED:
            break
    groups = best[1] if best is not None else _first_fit(job, cap)
    return groups, _time(job, groups, stages)


def _counts(need: int, nominal: int, most: int, pieces: int, stages: int) -> list[int]:
    """Numbers of micro-batches to try, ascending."""
    if stages == 1:
        # Order and number do not matter: few and equal micro-batches need the least memory.
        return sorted({max(need, nominal), max(need + 1, nominal), need + 3})
    counts = {min(max(count, need), most) for count in (nominal, nominal * 3 // 2, most)}
    # Where the cap binds, whole pieces do not fill the last token: leave some room.
    return sorted({min(count, pieces) for count in counts} | {need + 1, need + need // 4 + 2})


def _profiles(
    total: int, longest: int, counts: Sequence[int], stages: int
) -> Iterator[list[float]]:
    """Heights of micro-batches, which sum up to ``total``."""
    for count in counts:
        yield [total / count] * count
        if stages == 1:
            continue
        for before in range(1, min(_BEFORE, count)):
            yield _profile(total, longest, count, before)


def _profile(total: int, longest: int, count: int, before: int) -> list[float]:
    """Heights that grow for ``before`` steps to at least ``longest``, then shrink evenly."""
    rise = [1.0]
    for _ in range(before):
        rise.append(rise[-1] / _GROWTH)
    rise.reverse()
    after = count - 1 - before
    left = total / longest - sum(rise)  # for those after the heaviest, which is 1
    if left >= after:
        shape = rise + [1.0] * after
    elif left <= 0:
        shape = rise + [0.0] * after
    else:
        low, high = 0.0, 1.0
        for _ in range(20):
            rate = (low + high) / 2
            term, reached = 1.0, 0.0
            for _ in range(after):
                term *= rate
                reached += term
            low, high = (rate, high) if reached < left else (low, rate)
        shape = list(rise)
        for _ in range(after):
            shape.append(shape[-1] * high)
    unit = total / sum(shape)
    return [unit * height for height in shape]


def _estimate(job: Job, heights: Sequence[float]) -> tuple[list[int], list[int]]:
    """Loads and forwards of micro-batches that follow a profile, short pieces as a fluid."""
    count = len(heights)
    fluid, fluid_forward = sum(job.total), sum(job.forward)
    least = fluid // (8 * count)
    gaps = [(-height, index) for index, height in enumerate(heights)]
    heapq.heapify(gaps)
    forwards = [0.0] * count
    loads = [0.0] * count
    for total, forward in zip(job.total, job.forward, strict=True):
        if total < least:
            break
        gap, index = gaps[0]
        loads[index] += total
        forwards[index] += forward
        fluid -= total
        fluid_forward -= forward
        heapq.heapreplace(gaps, (gap + total, index))
    if fluid:
        share = fluid_forward / fluid
        # Raise all gaps by the same amount, down to none, until the fluid is used up.
        order = sorted(gaps)
        level, rest = 0.0, float(fluid)
        for number, (gap, _) in enumerate(order, 1):
            following = order[number][0] if number < count else None
            level = gap
            if following is None or (following - gap) * number >= rest:
                level += rest / number
                break
            rest -= (following - gap) * number
        for gap, index in order:
            if gap >= level:
                break
            loads[index] += level - gap
            forwards[index] += (level - gap) * share
    return [int(load) for load in loads], [int(forward) for forward in forwards]


def _fill(job: Job, heights: Sequence[float], cap: int) -> list[list[int]] | None:
    """Pieces in micro-batches that follow a profile; None where they do not fit the cap."""
    count = len(heights)
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    gaps = [(-height, index) for index, height in enumerate(heights)]
    heapq.heapify(gaps)
    for piece, total in enumerate(job.total):
        length = job.tokens[piece]
        full = []
        while gaps and tokens[gaps[0][1]] + length > cap:
            full.append(heapq.heappop(gaps))
        if not gaps:
            return None
        gap, index = gaps[0]
        heapq.heapreplace(gaps, (gap + total, index))
        groups[index].append(piece)
        tokens[index] += length
        for entry in full:
            heapq.heappush(gaps, entry)
    return [group for group in groups if group]


def _time(job: Job, groups: Sequence[Sequence[int]], stages: int) -> int:
    forwards = [sum(job.forward[piece] for piece in group) for group in groups]
    totals = [sum(job.total[piece] for piece in group) for group in groups]
    backwards = [total - forward for total, forward in zip(totals, forwards, strict=True)]
    return pipeline_time(forwards, backwards, stages)


def _first_fit(job: Job, cap: int) -> list[list[int]]:
    """Pieces in as many micro-batches as it takes, where no profile fits the cap."""
    groups: list[list[int]] = []
    room: list[int] = []
    for piece, length in enumerate(job.tokens):
        fitting = (index for index, left in enumerate(room) if left >= length)
        index = next(fitting, len(groups))
        if index == len(groups):
            groups.append([])
            room.append(cap)
        groups[index].append(piece)
        room[index] -= length
    return groups
