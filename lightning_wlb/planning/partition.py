"""Items of known work to a fixed number of receivers, so that the largest load is small.

:func:`partition` compares the ways that trainers know and takes the one with the smallest largest
load: longest first (Graham's LPT, :func:`.dealing.deal`), Karmarkar and Karp's differencing, blocks
of the given order, and one seeded shuffle. The first two are improved by moving and exchanging
items while that helps. Where the largest item alone is the largest load nothing can be better, and
the search ends.

Differencing (N. Karmarkar, R. Karp: "The differencing method of set partitioning", 1982) keeps
partial partitions and always merges the two with the largest spread, the heavy parts of one with
the light parts of the other. Here items that meet a partition one after another are dealt in one
run on a heap, so that n items take O(n·log R) beside the few merges of whole partitions.

With ``sized`` all receivers get equally many items, as trainers need that count samples and not
micro-batches. Sorted items are dealt R at a time, the heaviest of them to the least load.

Cost: 10,000 items on 512 receivers take about 20 ms. Results are deterministic: ties go by index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.planning.dealing import deal

Integers = NDArray[np.int64]

IMPROVED = 250_000
"""Pairs of items that a search for exchanges looks at, all rounds together: a few milliseconds."""

NEAR = 1000
"""The search ends where the largest load is within 1/1000 of the least that is possible."""


def partition(works: Integers, receivers: int, *, sized: bool = False) -> Integers:
    """The receiver of each item, int64 [items].

    Args:
        works: int64 [items], at least 1 each, whose sum fits in int64.
        receivers: number of receivers, at least 1. None is empty where there are as many items.
        sized: whether all receivers get equally many items; their number must divide the items'.
    """
    count = len(works)
    if receivers == 1 or count == 0:
        return np.zeros(count, np.int64)
    order = np.argsort(-works, kind="stable")
    if sized:
        found = [_sized(works, order, receivers), _differenced_in_rows(works, order, receivers)]
    else:
        dealt, differenced = (np.empty(count, np.int64) for _ in range(2))
        dealt[order] = deal(works[order].tolist(), [0] * receivers)
        if _largest(works, dealt, receivers) == works[order[0]]:
            return dealt
        differenced[order] = difference(works[order].tolist(), receivers)
        found = [dealt, differenced]
    found = [_improved(works, home, receivers, sized) for home in found]
    blocks = np.arange(count) * receivers // count
    shuffled = blocks[np.random.default_rng(0).permutation(count)]
    # The first of equal ones is taken.
    return min(*found, blocks, shuffled, key=lambda home: _largest(works, home, receivers))


def in_order(
    works: Sequence[int], parts: int, tokens: Sequence[int] = (), cap: int | None = None
) -> list[int] | None:
    """Where to cut a sequence of items into runs whose largest work is as small as possible.

    Args:
        works: of each item, at least 1.
        parts: number of runs. None is empty where there are as many items.
        tokens: of each item, where there is a cap.
        cap: most tokens of a run.

    Returns:
        ``parts + 1`` bounds; None where so many runs cannot hold the items under the cap.
    """
    count = len(works)
    work_before = [0, *accumulate(works)]
    tokens_before = [0, *accumulate(tokens)] if cap is not None else []

    def cuts(most: int) -> list[int]:
        bounds = [0]
        for left in range(parts - 1, -1, -1):
            at = bounds[-1]
            stop = bisect_right(work_before, work_before[at] + most) - 1
            if cap is not None:
                stop = min(stop, bisect_right(tokens_before, tokens_before[at] + cap) - 1)
            bounds.append(max(min(stop, count - left), min(at + 1, count)))
        return bounds

    high = work_before[-1]
    low = max(max(works, default=0), -(-high // parts))
    if cuts(high)[-1] < count:
        return None
    while low < high:
        middle = (low + high) // 2
        if cuts(middle)[-1] == count:
            high = middle
        else:
            low = middle + 1
    return cuts(high)


def difference(works: Sequence[int], receivers: int) -> list[int]:
    """Karmarkar and Karp's differencing method over any number of receivers, at least 2.

    Args:
        works: descending, at least 1 each.
        receivers: number of receivers.

    Returns:
        The receiver of each item.
    """
    count = len(works)
    # A load is one integer: its work, and below that the number of the node that holds it. Nodes
    # are the items, then the unions of two nodes; comparing integers is faster than tuples.
    bits = (2 * count).bit_length()
    mask = (1 << bits) - 1
    unions: list[tuple[int, int]] = []

    def union(load: int, other: int) -> int:
        unions.append((load & mask, other & mask))
        return ((load >> bits) + (other >> bits) << bits) | (count + len(unions) - 1)

    def spread(loads: Sequence[int]) -> int:
        return (max(loads) >> bits) - (min(loads) >> bits if len(loads) == receivers else 0)

    states: list[tuple[int, int, list[int]]] = []  # (-spread, age, loads that are not zero)
    at = age = 0
    while at < count or len(states) > 1:
        top = -states[0][0] if states else -1
        if at < count and works[at] >= top:
            # Single items of more work than any spread gather in one partial partition.
            state: list[int] = []
            first = works[at]
            while at < count and len(state) < receivers and works[at] >= top:
                state.append(works[at] << bits | at)
                at += 1
            if len(state) < receivers and states:
                state = _merged(state, heapq.heappop(states)[2], receivers, union)
                first = spread(state)
            elif len(state) == receivers:
                first = spread(state)
        else:
            state = heapq.heappop(states)[2]
            second = -states[0][0] if states else -1
            if at < count and works[at] >= second:
                # A run of single items, each to the least load.
                heapq.heapify(state)
                largest = max(state) >> bits
                first = spread(state)
                while at < count and first >= works[at] >= second:
                    item = works[at] << bits | at
                    at += 1
                    if len(state) < receivers:
                        heapq.heappush(state, item)
                    else:
                        item = union(state[0], item)
                        heapq.heapreplace(state, item)
                    largest = max(largest, item >> bits)
                    first = largest - (state[0] >> bits if len(state) == receivers else 0)
            else:
                state = _merged(state, heapq.heappop(states)[2], receivers, union)
                first = spread(state)
        heapq.heappush(states, (-first, age, state))
        age += 1
    homes = [0] * (count + len(unions))
    for receiver, load in enumerate(states[0][2]):
        homes[load & mask] = receiver
    for node in range(len(unions) - 1, -1, -1):
        for part in unions[node]:
            homes[part] = homes[count + node]
    return homes[:count]


def _merged(
    state: list[int], other: list[int], receivers: int, union: Callable[[int, int], int]
) -> list[int]:
    """Both partitions as one: the heaviest loads of one with the lightest of the other."""
    light, heavy = sorted(state), sorted(other, reverse=True)
    free = receivers - len(light)  # receivers of the first that have nothing yet
    over = heavy[free:]
    unions = [union(load, more) for load, more in zip(light, over, strict=False)]
    return heavy[:free] + unions + light[len(over) :]


def _sized(works: Integers, order: Integers, receivers: int) -> Integers:
    """Sorted items dealt by rows of ``receivers``, the heaviest of a row to the least load."""
    home = np.empty(len(works), np.int64)
    loads = np.zeros(receivers, np.int64)
    for row in order.reshape(-1, receivers):
        least = np.argsort(loads, kind="stable")
        home[row] = least
        loads[least] += works[row]
    return home


def _differenced_in_rows(works: Integers, order: Integers, receivers: int) -> Integers:
    """Differencing of partial partitions that begin as rows of ``receivers`` items each."""
    rows = order.reshape(-1, receivers)
    # Member lists of each partition, receivers in order of descending load: [receivers, items].
    states = [
        (-int(works[row[0]] - works[row[-1]]), age, works[row], row[:, None])
        for age, row in enumerate(rows)
    ]
    heapq.heapify(states)
    while len(states) > 1:
        _, age, loads, members = heapq.heappop(states)
        _, _, other, others = states[0]
        loads = loads + other[::-1]
        descending = np.argsort(-loads, kind="stable")
        loads = loads[descending]
        members = np.concatenate((members, others[::-1]), axis=1)[descending]
        heapq.heapreplace(states, (-int(loads[0] - loads[-1]), age, loads, members))
    home = np.empty(len(works), np.int64)
    home[states[0][3]] = np.arange(receivers)[:, None]
    return home


def _largest(works: Integers, home: Integers, receivers: int) -> int:
    return int(_loads(works, home, receivers).max())


def _loads(works: Integers, home: Integers, receivers: int) -> Integers:
    loads = np.zeros(receivers, np.int64)
    np.add.at(loads, home, works)
    return loads


def _improved(works: Integers, home: Integers, receivers: int, sized: bool) -> Integers:
    """Move an item of the largest load, or exchange it for one of another, while that helps."""
    home, loads = home.copy(), _loads(works, home, receivers)
    least = max(int(works.max()), -(-int(works.sum()) // receivers))
    looked = 0
    while looked < IMPROVED:
        busiest = int(loads.argmax())
        most = int(loads[busiest])
        if NEAR * (most - least) <= least:
            break
        own, rest = np.flatnonzero(home == busiest), np.flatnonzero(home != busiest)
        # A move is an exchange for nothing.
        back = works[rest] if sized else np.concatenate((works[rest], np.zeros(receivers, int)))
        to = home[rest] if sized else np.concatenate((home[rest], np.arange(receivers)))
        given = works[own][:, None] - back
        larger = np.maximum(most - given, loads[to] + given)
        larger[(given <= 0) | (to == busiest)] = most
        looked += larger.size
        mine, yours = divmod(int(larger.argmin()), len(back))
        if larger[mine, yours] >= most:
            break
        other, amount = int(to[yours]), int(given[mine, yours])
        home[own[mine]] = other
        if yours < len(rest):
            home[rest[yours]] = busiest
        loads[busiest] -= amount
        loads[other] += amount
    return home
