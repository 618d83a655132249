"""Longest first: how pieces are sorted, filled into bins, and how sorted work is dealt.

Dealing work in descending order, each time to the receiver with the least so far, is the classic
greedy for equal loads (Graham's LPT rule): the largest load is at most 4/3 of the best possible
one, and where there are many small pieces, loads differ by no more than the smallest.

Cost: O(n·log n) for n pieces, and O(log R) for each piece dealt to R receivers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from lightning_wlb.plan import Piece


def longest_first(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces by descending tokens, equal ones by (document, origin)."""
    order = sorted(pieces)
    lengths = [stop - origin for _, origin, stop, _ in order]
    # Python's sort is stable, also in reverse, so equal lengths keep their order.
    return [order[at] for at in sorted(range(len(order)), key=lengths.__getitem__, reverse=True)]


def fill(pieces: Sequence[Piece], cap: int) -> list[list[Piece]]:
    """Best-fit-decreasing: each into the fullest bin that has room, or else into a new one.

    Args:
        pieces: of at most ``cap`` tokens each.
        cap: most tokens of a bin.

    Returns:
        The bins as they were opened; of equally full ones the first is taken.
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
        works: of what is dealt, usually descending.
        loads: work that each receiver has; what it gets is added.

    Returns:
        The receiver of each.
    """
    heap = [(load, number) for number, load in enumerate(loads)]
    heapq.heapify(heap)
    receivers = []
    for work in works:
        load, number = heap[0]
        receivers.append(number)
        loads[number] = load + work
        heapq.heapreplace(heap, (loads[number], number))
    return receivers


def deal_capped(
    pieces: Sequence[Piece],
    bins: int,
    cap: int,
    work: Callable[[int], int],
    begun: Sequence[tuple[int, int]] = (),
) -> tuple[list[list[Piece]], list[Piece]]:
    """Deal pieces to micro-batches of nearly equal work: WLB-LLM Algorithm 1, lines 16-28.

    Pieces go in descending length to the micro-batch with the least work; where that would pass
    the cap, to the micro-batch with the fewest tokens; where that would pass it too, they do not
    fit. Short pieces come last and even out what the long ones left, so micro-batches end with
    equal work and unequal length. A piece may fill a micro-batch exactly (``<=`` where the listing
    as printed has ``<``, by which a piece of ``cap`` tokens would wait for ever).

    Args:
        pieces: what may enter the step, none longer than ``cap``.
        bins: number of micro-batches, N.
        cap: most tokens of a micro-batch, L_max.
        work: cost of a piece from its tokens, an integer.
        begun: work and tokens that the first micro-batches hold before.

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
