"""Deals one step's whole sequences to the ranks of any trainer, in micro-batches under a cap.

Where ranks meet only to reduce gradients, they wait for the rank with the most work in the step.
So sequences are dealt to ranks first (:func:`partition`). Each rank's sequences then go into as few
micro-batches as hold them, by WLB-LLM's Algorithm 1: longest first into the micro-batch with the
least work, or the fewest tokens where that would pass the cap. All ranks are packed at once.

Where ranks meet in every micro-batch (parameters are gathered again in each: ZeRO-3, FSDP with
resharding), the k-th micro-batches of all ranks take as long as the longest of them (``lockstep``).
Then micro-batches are also formed over all ranks, sorted by work and dealt in rows, each row's
heaviest to the rank with the least work so far. The faster of both dealings is kept.

Sequences stay whole on one rank, so a sequence with more work than the mean rank bounds the
balance. :class:`~lightning_wlb.planning.planner.Planner` slices sequences and shares them.

Cost: 10,000 sequences on 512 ranks take 20 to 40 ms (``benchmarks/adapters.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.planning.dealing import deal

Integers = NDArray[np.int64]

PRECISE = 2.0**50
"""The work of a step, as integers: enough for every difference, and far from overflow."""

IMPROVED = 250_000
"""Pairs of items that a search for exchanges looks at, all rounds together: a few milliseconds."""

NEAR = 5000
"""The search ends where the largest load is within 1/5000 of the least possible one."""

SHOWN = 8
"""Ranks and sequences of a micro-batch that are printed."""


@dataclass(frozen=True)
class Balance:
    """How even a step is. An imbalance is the longest rank's work over the mean's; 1 is even."""

    imbalance_before: float  #: of sequences dealt in turn, as by ``DistributedSampler``
    imbalance: float  #: of the plan, if ranks wait for each other at the end of the step
    lockstep_imbalance: float  #: of the plan, if ranks wait for each other in every micro-batch

    def __str__(self) -> str:
        text = f"imbalance {self.imbalance_before:.3f} -> {self.imbalance:.3f}"
        return f"{text} ({self.lockstep_imbalance:.3f} if ranks meet in every micro-batch)"


@dataclass(frozen=True)
class BalancedStep:
    """Which sequences each rank runs, in which micro-batch; plain lists of plain integers.

    Attributes:
        micro_batches: [rank][micro-batch] -> numbers of its sequences, ascending. All ranks have
            equally many micro-batches, the heaviest first. A micro-batch may be empty if a rank has
            fewer sequences than the others have micro-batches.
        tokens: [rank][micro-batch], the tokens of each.
        balance: how even the step is.
        max_tokens: the cap of a micro-batch, if there is one.
    """

    micro_batches: list[list[list[int]]]
    tokens: list[list[int]]
    balance: Balance
    max_tokens: int | None = None

    def __str__(self) -> str:
        lines = [
            f"{sum(map(sum, self.tokens)):,} tokens on {len(self.tokens)} ranks: {self.balance}"
        ]
        for number, (rank, tokens) in enumerate(zip(self.micro_batches, self.tokens, strict=True)):
            if number == SHOWN:
                lines.append(f"  ... and {len(self.tokens) - SHOWN} more ranks")
                break
            shown = []
            for sequences, length in zip(rank, tokens, strict=True):
                more = ", ..." if len(sequences) > SHOWN else ""
                shown.append(f"{length:,} tokens [{', '.join(map(str, sequences[:SHOWN]))}{more}]")
            lines.append(f"  rank {number}: {'; '.join(shown)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Items:
    """What is dealt as a whole: sequences, or sequences that stay together."""

    works: Integers  #: int64 [items], at least 1 each
    tokens: Integers  #: int64 [items]
    members: Sequence[Sequence[int]] = field(repr=False)  #: the sequences of each item


def as_integers(work: NDArray[np.float64]) -> Integers:
    """Work of any unit as integers of at least 1 whose sum is about 2^50."""
    unit = max(float(work.sum()) / PRECISE, np.finfo(np.float64).tiny)
    return np.maximum(np.rint(work / unit), 1).astype(np.int64)


def deal_step(
    items: Items,
    ranks: int,
    cap: int | None,
    *,
    least: int = 1,
    equal_sizes: bool = False,
    lockstep: bool = False,
    no_empty: bool = False,
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> its items; no micro-batch has more tokens than the cap.

    All ranks have as many micro-batches as the one that needs most, and at least ``least``. The
    other arguments are those of :func:`.plan_step`; ``cap`` is its ``max_tokens``.
    """
    home = partition(items.works, ranks, sized=equal_sizes)
    dealt = _packed(items, home, ranks, cap, least)
    while no_empty and len(items.members) >= ranks * len(dealt[0]) and not all(map(all, dealt)):
        home = _with_enough(items, home, ranks, len(dealt[0]))
        dealt = _packed(items, home, ranks, cap, len(dealt[0]))
    if not lockstep or equal_sizes:
        return dealt
    rows = _in_rows(items, ranks, len(dealt[0]), cap)
    return dealt if rows is None else min(dealt, rows, key=lambda each: lockstep_work(items, each))


def _with_enough(items: Items, home: Integers, ranks: int, least: int) -> Integers:
    """A dealing in which ranks with fewer than ``least`` items get the lightest ones of others."""
    home = home.copy()
    sizes = np.bincount(home, minlength=ranks)
    while int(sizes.min()) < least:
        poor, rich = int(sizes.argmin()), np.flatnonzero(sizes[home] > least)
        home[rich[items.works[rich].argmin()]] = poor
        sizes = np.bincount(home, minlength=ranks)
    return home


def lockstep_work(items: Items, dealt: list[list[list[int]]]) -> int:
    """Work of a step whose ranks wait for each other in every micro-batch."""
    works = items.works.tolist()
    return sum(
        max(sum(works[item] for item in own) for own in row) for row in zip(*dealt, strict=True)
    )


def _in_rows(items: Items, ranks: int, count: int, cap: int | None) -> list[list[list[int]]] | None:
    """``ranks * count`` micro-batches of all items, dealt in rows of similar work."""
    bins = ranks * count
    home = partition(items.works, bins)
    loads, tokens = (_loads(each, home, bins) for each in (items.works, items.tokens))
    if cap is not None and int(tokens.max()) > cap:
        return None
    order = np.argsort(-loads, kind="stable")
    owner, members = _dealt_by_rows(loads, order, ranks), _grouped(home, bins)
    return [[members[order[at]] for at in own] for own in _grouped(owner[order], ranks)]


def _packed(
    items: Items, home: Integers, ranks: int, cap: int | None, least: int
) -> list[list[list[int]]]:
    """The items of each rank in micro-batches under the cap, as few as the fullest rank needs."""
    most = int(np.iinfo(np.int64).max) // 4
    room = most if cap is None else min(cap, most)
    sizes = np.bincount(home, minlength=ranks)
    order = np.lexsort((-items.works, home))
    begins = np.cumsum(sizes) - sizes
    # Ranks with the most items first, so that the ranks with a j-th item are a prefix.
    rows = np.argsort(-sizes, kind="stable")

    def filled(count: int) -> Integers | None:
        """The micro-batch of each item on its rank; None if ``count`` micro-batches are too few."""
        bins = np.zeros(len(home), np.int64)
        loads, used = np.zeros((2, ranks, count), np.int64)
        active = ranks
        for at in range(int(sizes.max())):
            while sizes[rows[active - 1]] <= at:
                active -= 1
            item, each = order[begins[rows[:active]] + at], np.arange(active)
            tokens = items.tokens[item]
            chosen = loads[:active].argmin(axis=1)
            full = used[each, chosen] + tokens > room
            if full.any():
                chosen = np.where(full, used[:active].argmin(axis=1), chosen)
                if (used[each, chosen] + tokens > room).any():
                    return None
            bins[item] = chosen
            loads[each, chosen] += items.works[item]
            used[each, chosen] += tokens
        return bins

    count = max(_fewest(items.tokens, home, ranks, room), least)
    while (bins := filled(count)) is None:
        count += 1
    members = _grouped(home * count + bins, ranks * count)
    works = items.works.tolist()
    return [
        sorted(own, key=lambda pack: -sum(works[item] for item in pack))
        for own in (members[at : at + count] for at in range(0, ranks * count, count))
    ]


def _fewest(tokens: Integers, home: Integers, ranks: int, room: int) -> int:
    """A lower bound of the micro-batches that the fullest rank needs.

    A rank needs enough micro-batches for its tokens, and for each n enough to hold n items as long
    as its n-th longest. The second bound saves trials where many items exceed half of the cap.
    """
    order = np.lexsort((-tokens, home))
    sizes = np.bincount(home, minlength=ranks)
    place = np.arange(len(home)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    most = int(_loads(tokens, home, ranks).max())
    return max(-(-most // room), 1 + int((place // (room // tokens[order])).max()))


def _grouped(home: Integers, groups: int) -> list[list[int]]:
    order = np.argsort(home, kind="stable").tolist()
    ends = np.cumsum(np.bincount(home, minlength=groups)).tolist()
    return [order[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def partition(works: Integers, receivers: int, *, sized: bool = False) -> Integers:
    """The receiver of each item, int64 [items], so that the largest load is small.

    Items are dealt longest first (Graham's LPT), then moved and exchanged while that makes the
    largest load smaller. Equal blocks of the given order or of one seeded shuffle, as trainers deal
    them, are taken if they happen to be better. Ties go by index.

    Args:
        works: int64 [items], at least 1 each, whose sum fits in int64.
        receivers: number of receivers, at least 1; with at least as many items none is empty.
        sized: whether all get equally many items; ``receivers`` must then divide their number.
    """
    count = len(works)
    if receivers == 1 or count == 0:
        return np.zeros(count, np.int64)
    order = np.argsort(-works, kind="stable")
    if sized:
        home = _dealt_by_rows(works, order, receivers)
    else:
        home = np.empty(count, np.int64)
        home[order] = deal(works[order].tolist(), [0] * receivers)
        if _loads(works, home, receivers).max() == works[order[0]]:
            return home
    home = _improved(works, home, receivers, sized)
    blocks = np.arange(count) * receivers // count
    shuffled = blocks[np.random.default_rng(0).permutation(count)]
    # Among equally good dealings the first is taken.
    return min(home, blocks, shuffled, key=lambda each: _loads(works, each, receivers).max())


def _dealt_by_rows(works: Integers, order: Integers, receivers: int) -> Integers:
    """Deal sorted items by rows of ``receivers``, the heaviest of a row to the least load."""
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
    """Move an item from the largest load, or exchange it for a smaller item, while that helps."""
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
