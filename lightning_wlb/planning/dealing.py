"""Greedy dealing: pieces to micro-batches, micro-batches to replicas, pieces to pipelines.

Dealing work in descending order, each time to the receiver with the least so far, is the classic
greedy for equal loads (Graham's LPT rule): the largest load is at most 4/3 of the best possible
one, and where there are many small pieces, loads differ by no more than the smallest. Packings that
keep pieces whole form micro-batches over all replicas at once (N is a global number) and then deal
these, so a replica may get more micro-batches than another, or none.

:func:`deal_greedily` deals pieces to pipelines of unequal depth (Hydraulis, Algorithm 1). The time
of a pipeline is not known before its pieces are packed. It is estimated as the cost of its pieces
on one stage plus P - 1 times the cost of the costliest piece (Hydraulis, Equation 2). The algorithm
makes the largest of these bounds small. A pipeline's real time may be above or below its bound:
simulate the step where the time itself is needed.

Cost: O(n·log n) for n pieces and O(log R) for each piece dealt to R receivers; O(trials · n · R) in
compiled loops for :func:`deal_greedily`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from lightning_wlb.plan import Piece

Deal = Callable[[Sequence[int], int], list[list[int]]]
"""(work of each micro-batch, number of replicas) -> each replica's micro-batches, ascending."""


def longest_first(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces by descending tokens, equal ones by (document, origin)."""
    order = sorted(pieces)
    lengths = [stop - origin for _, origin, stop, _ in order]
    # Python's sort is stable, also in reverse, so equal lengths keep their order.
    return [order[at] for at in sorted(range(len(order)), key=lengths.__getitem__, reverse=True)]


def fill(pieces: Sequence[Piece], cap: int) -> list[list[Piece]]:
    """Best-fit-decreasing: each piece goes into the fullest bin with room, or else into a new one.

    No piece may be longer than ``cap``, the most tokens of a bin. Among equally full bins the first
    is taken. Bins are returned in the order in which they were opened.
    """
    bins: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for piece in longest_first(pieces):
        at = bisect_left(rooms, (piece.tokens, -1))
        if at == len(rooms):
            bins.append([piece])
            insort(rooms, (cap - piece.tokens, len(bins) - 1))
        else:
            room, index = rooms.pop(at)
            bins[index].append(piece)
            insort(rooms, (room - piece.tokens, index))
    return bins


def deal(works: Sequence[int], loads: list[int]) -> list[int]:
    """Deal work in the order given, each time to the least loaded; equal loads go by number.

    Args:
        works: the work of each item, usually descending.
        loads: the work that each receiver has already; the dealt work is added to it.

    Returns:
        The receiver of each item.
    """
    # Load and number as one integer, which the heap compares faster than a pair.
    bits = len(loads).bit_length()
    heap = [load << bits | number for number, load in enumerate(loads)]
    heapq.heapify(heap)
    receivers = []
    for work in works:
        least = heap[0]
        receivers.append(least & (1 << bits) - 1)
        heapq.heapreplace(heap, least + (work << bits))
    for least in heap:
        loads[least & (1 << bits) - 1] = least >> bits
    return receivers


def deal_capped(
    pieces: Sequence[Piece],
    bins: int,
    cap: int,
    work: Callable[[int], int],
    begun: Sequence[tuple[int, int]] = (),
) -> tuple[list[list[Piece]], list[Piece]]:
    """Deal pieces to micro-batches of nearly equal work: WLB-LLM Algorithm 1, lines 16-28.

    Pieces go in descending length to the micro-batch with the least work, or to the one with the
    fewest tokens where that would pass the cap. A piece that would pass the cap there too does not
    fit. Short pieces come last and even out the work of the long ones, so micro-batches end with
    equal work and unequal length. A piece may fill a micro-batch exactly; with the ``<`` of the
    printed listing a piece of ``cap`` tokens would wait for ever.

    Args:
        pieces: what may enter the step, none longer than ``cap``.
        bins: number of micro-batches, N.
        cap: most tokens of a micro-batch, L_max.
        work: cost of a piece from its tokens, an integer.
        begun: work and tokens that the first micro-batches hold already.

    Returns:
        ``bins`` micro-batches, some possibly empty, and the pieces that did not fit. Equal lengths
        go by (document, origin), equal micro-batches by number.
    """
    dealt: list[list[Piece]] = [[] for _ in range(bins)]
    left: list[Piece] = []
    loads, tokens = [0] * bins, [0] * bins
    for number, (load, length) in enumerate(begun):
        loads[number], tokens[number] = load, length
    # A heap entry is stale once its bin has grown; it is dropped when it comes to the top.
    by_load = [(load, number) for number, load in enumerate(loads)]
    by_tokens = [(length, number) for number, length in enumerate(tokens)]
    heapq.heapify(by_load)
    heapq.heapify(by_tokens)
    for piece in longest_first(pieces):
        while by_load[0][0] != loads[by_load[0][1]]:
            heapq.heappop(by_load)
        while by_tokens[0][0] != tokens[by_tokens[0][1]]:
            heapq.heappop(by_tokens)
        length = piece.tokens
        chosen = by_load[0][1]
        if tokens[chosen] + length > cap:
            chosen = by_tokens[0][1]
            if tokens[chosen] + length > cap:
                left.append(piece)
                continue
        dealt[chosen].append(piece)
        loads[chosen] += work(length)
        tokens[chosen] += length
        heapq.heappush(by_load, (loads[chosen], chosen))
        heapq.heappush(by_tokens, (tokens[chosen], chosen))
    return dealt, left


def round_robin(works: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal micro-batches in their order, one to each replica in turn; see :data:`.Deal`."""
    return [list(range(replica, len(works), replicas)) for replica in range(replicas)]


def heaviest_first(works: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal micro-batches by descending work, each to the replica with the least work so far.

    Equal micro-batches go by index, equal replicas by number. See :data:`.Deal`.
    """
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    order = sorted(range(len(works)), key=lambda index: (-works[index], index))
    receivers = deal([works[index] for index in order], [0] * replicas)
    for index, replica in zip(order, receivers, strict=True):
        dealt[replica].append(index)
    return [sorted(indices) for indices in dealt]


TRIALS = 100  # random orders, as in the experiments of Hydraulis

Costs = Sequence[Sequence[int | None]]
"""[piece][pipeline]: forward and backward cost on one stage; None where the piece cannot run."""


def deal_greedily(costs: Costs, stages: Sequence[int]) -> list[list[int]]:
    """Deal pieces one by one in random order, each where the largest bound grows least.

    Hydraulis' Algorithm 1 does so for many random orders and keeps the best result; here all orders
    run at once. If several pipelines leave the largest bound the same, the paper takes the first;
    here the pipeline with the least bound of its own is taken, which keeps more options. The orders
    and the result are the same on any machine. ``stages`` has the depth of each pipeline.

    Returns:
        For each pipeline the indices of its pieces, ascending.

    Raises:
        ValueError: a piece that no pipeline can run.
    """
    for index, row in enumerate(costs):
        if all(cost is None for cost in row):
            raise ValueError(
                f"piece {index} can run on none of {len(row)} pipelines: it is longer than any of"
                " them holds. Give a pipeline of more context or tensor ranks."
            )
    # 62 bits hold the largest bound, whatever the unit of the costs is.
    unit = (max(stages) * sum(max(filter(None, each), default=0) for each in costs) >> 62) + 1
    never = np.iinfo(np.int64).max
    units = np.array([[(cost or 0) // unit for cost in each] for each in costs], dtype=np.int64)
    runs = np.array([[cost is not None for cost in each] for each in costs], dtype=bool)
    units, runs = (each.reshape(len(costs), len(stages)) for each in (units, runs))
    deeper = np.array(stages, dtype=np.int64) - 1
    generator = np.random.default_rng(0)
    orders = np.array([generator.permutation(len(costs)) for _ in range(TRIALS)])
    trial, each = np.arange(TRIALS), np.arange(len(stages))
    totals, longest, bounds = (np.zeros((TRIALS, len(stages)), np.int64) for _ in range(3))
    homes = np.zeros((TRIALS, len(costs)), np.int64)
    for pieces in orders.T:
        cost = units[pieces]
        grown = totals + cost + deeper * np.maximum(longest, cost)
        first = bounds.argmax(axis=1)
        others = bounds.copy()
        others[trial, first] = 0
        # For each pipeline the largest bound of the others.
        others = np.where(
            each == first[:, None], others.max(axis=1)[:, None], bounds.max(axis=1)[:, None]
        )
        after = np.where(runs[pieces], np.maximum(grown, others), never)
        least = after == after.min(axis=1)[:, None]
        chosen = np.where(least, grown, never).argmin(axis=1)
        homes[trial, pieces] = chosen
        totals[trial, chosen] += cost[trial, chosen]
        longest[trial, chosen] = np.maximum(longest[trial, chosen], cost[trial, chosen])
        bounds[trial, chosen] = grown[trial, chosen]
    best = homes[bounds.max(axis=1).argmin()]
    return [np.flatnonzero(best == pipeline).tolist() for pipeline in range(len(stages))]
