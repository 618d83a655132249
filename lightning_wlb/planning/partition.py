"""Items of known work to a fixed number of receivers, so that the largest load is small.

:func:`partition` deals longest first (Graham's LPT, :func:`.dealing.deal`), and moves and exchanges
items while that makes the largest load smaller. Where the largest item alone is the largest load
nothing can be better, and the search ends. Blocks of the given order and one seeded shuffle, which
trainers use, are taken where they happen to be better.

With ``sized`` all receivers get equally many items, as trainers need that count samples and not
micro-batches. Sorted items are dealt R at a time, the heaviest of them to the least load.

Cost: 10,000 items on 512 receivers take about 10 ms. Results are deterministic: ties go by index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.planning.dealing import deal

Integers = NDArray[np.int64]

IMPROVED = 250_000
"""Pairs of items that a search for exchanges looks at, all rounds together: a few milliseconds."""

NEAR = 5000
"""The search ends where the largest load is within 1/5000 of the least that is possible."""


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
        home = _sized(works, order, receivers)
    else:
        home = np.empty(count, np.int64)
        home[order] = deal(works[order].tolist(), [0] * receivers)
        if _loads(works, home, receivers).max() == works[order[0]]:
            return home
    home = _improved(works, home, receivers, sized)
    blocks = np.arange(count) * receivers // count
    shuffled = blocks[np.random.default_rng(0).permutation(count)]
    # The first of equal ones is taken.
    return min(home, blocks, shuffled, key=lambda each: _loads(works, each, receivers).max())


def _sized(works: Integers, order: Integers, receivers: int) -> Integers:
    """Sorted items dealt by rows of ``receivers``, the heaviest of a row to the least load."""
    home = np.empty(len(works), np.int64)
    loads = np.zeros(receivers, np.int64)
    for row in order.reshape(-1, receivers):
        least = np.argsort(loads, kind="stable")
        home[row] = least
        loads[least] += works[row]
    return home


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
