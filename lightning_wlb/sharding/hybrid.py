"""Long pieces cut between ranks at tile boundaries, short ones whole on one rank.

A kernel computes queries in tiles of 128 rows, so a cut between tiles is free as long as both
sides keep two tiles, and any other cut costs about one more tile. So

1. pieces whose work is a small share of a rank's stay whole: longest first, each to the rank with
   the least work that has room for its rows;
2. a piece that no rank should have whole is cut at tile boundaries counted from its *end*, which
   leaves its partial tile at the head, where it reads one key/value tile: that head is a short
   piece like any other. A piece of few tiles is cut for just so many ranks that a share is small,
   in pairs from both ends (early and late tiles together are average work), and the shares are
   dealt like whole pieces;
3. the shortest pieces are held back and fill every rank up to the number of rows at which only
   whole tiles are missing; where a piece does not fit it is cut, so token counts are equal to
   within one, at the price of one cheap tile for a rank;
4. the longest pieces give every rank the tiles it misses, in pairs from both ends: moving a tile
   from the back to the front changes a rank's work and not its rows, by the same amount for each
   tile. So the number of front tiles that makes a rank's work equal to the mean has a closed form,
   and what rounding leaves is passed on to the next, shorter piece.

What counts as small is 1/8 of a rank's work, and where that does not balance to 2 % also 1/32, of
which the better one is taken: whole pieces need no keys of other ranks, so the larger goes first.

Within 0.3 % of the ideal at CP 4 and 5 % at CP 16 under the reference kernel cost
(benchmarks/context_parallel.py; modelled), which it optimises: measure before believing. Not for
micro-batches of a few tiles per rank, where there is nothing to align.

Cost: plain Python over pieces and ranks, O((pieces + ranks) · ranks); 0.3 ms at CP 4, 0.9 ms at
CP 16.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_wlb.cost.kernel import OVERHEAD, TILE, UNITS, reference_kernel_cost
from lightning_wlb.sharding.arrays import Integers

SHARES = (8, 32)
"""A piece stays whole up to one part in so many of a rank's work; tried in this order."""

GOOD_PERMILLE = 20
"""A share is good enough where no rank has so much more work than the mean."""

LEAST_TILES = 4
"""Tiles of a rank's share of a cut piece: two from each end, so that no segment is one tile."""

_Rows = tuple[int, int]  # start, stop in tokens of the piece


class _Share(NamedTuple):
    """Chunks of one piece that go to one rank together; they sort in the order of dealing."""

    minus_cost: int
    document: int
    rows: int
    chunks: tuple[_Rows, ...]


@dataclass(slots=True)
class _Long:
    """Whole tiles of a piece, from token ``head`` to its end."""

    tiles: int
    document: int
    head: int

    def cost(self, first: int, last: int) -> int:
        """Cost of a segment of tiles [first, last)."""
        count = last - first
        before = -(-self.head // TILE)
        read = count * (before + 1) + (first + last - 1) * count // 2
        return UNITS * OVERHEAD * count + (UNITS + (count == 1)) * read

    def rows(self, first: int, last: int) -> _Rows:
        """Tokens of tiles [first, last)."""
        return self.head + TILE * first, self.head + TILE * last


@dataclass(slots=True)
class _Group:
    """The ranks: rows they have room for, work, and the chunks dealt so far."""

    room: list[int]
    cost: list[int]
    chunks: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, rank: int, document: int, rows: _Rows, cost: int) -> None:
        self.chunks.append((rank, document, *rows))
        self.room[rank] -= rows[1] - rows[0]
        self.cost[rank] += cost


def hybrid(lengths: Integers, ranks: int) -> Integers:
    """Cut long pieces at tile boundaries, keep short ones whole, equalise rows and work."""
    if len(lengths) == 0:
        return np.empty((0, 4), dtype=np.int64)
    costs = reference_kernel_cost(lengths, lengths).tolist()
    best: _Group | None = None
    for share in SHARES:
        group = _dealt(lengths.tolist(), costs, ranks, share)
        if best is None or max(group.cost) < max(best.cost):
            best = group
        if 1000 * ranks * max(group.cost) <= (1000 + GOOD_PERMILLE) * sum(group.cost):
            break
    assert best is not None
    return np.array(best.chunks, dtype=np.int64)


def _dealt(lengths: list[int], costs: list[int], ranks: int, share: int) -> _Group:
    tokens, total = sum(lengths), sum(costs)
    group = _Group(
        room=[tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)],
        cost=[0] * ranks,
    )
    shares: list[_Share] = []
    longs: list[_Long] = []
    for document, (length, cost) in enumerate(zip(lengths, costs, strict=True)):
        tiles, head = divmod(length, TILE)
        work = cost * ranks * share
        if tiles < LEAST_TILES or (work <= total and 4 * length * ranks <= tokens):
            shares.append(_Share(-cost, document, length, ((0, length),)))
            continue
        if head:
            shares.append(_Share(-_segment_cost(head, head), document, head, ((0, head),)))
        long = _Long(tiles, document, head)
        if tiles >= LEAST_TILES * ranks:
            longs.append(long)
        else:
            parts = max(-(-work // total), -(-4 * length * ranks // tokens))
            _cut(long, min(parts, tiles // LEAST_TILES), shares)
    shares.sort()
    longs.sort(key=lambda each: (-each.tiles, each.document))
    held = _deal_shares(group, shares)
    tiles_of = _equalise(group, held, longs)
    _deal_longs(group, longs, tiles_of)
    return group


def _segment_cost(queries: int, keys: int) -> int:
    """:func:`.reference_kernel_cost` of one segment."""
    tiles = -(-queries // TILE)
    before = -(-(keys - queries) // TILE)
    read = (tiles - 1) * before + tiles * (tiles - 1) // 2 - (-keys // TILE)
    return UNITS * OVERHEAD * tiles + (UNITS + (queries <= TILE)) * read


def _cut(long: _Long, parts: int, shares: list[_Share]) -> None:
    """Append equal shares of a piece: pairs of chunks from both ends, the last its middle."""
    front, back = 0, long.tiles
    for left in range(parts, 1, -1):
        tiles = (back - front) // left
        first, last = front + tiles // 2, back - (tiles - tiles // 2)
        cost = long.cost(front, first) + long.cost(last, back)
        chunks = (long.rows(front, first), long.rows(last, back))
        shares.append(_Share(-cost, long.document, TILE * tiles, chunks))
        front, back = first, last
    cost = long.cost(front, back)
    rows = long.rows(front, back)
    shares.append(_Share(-cost, long.document, TILE * (back - front), (rows,)))


def _deal_shares(group: _Group, shares: list[_Share]) -> list[_Share]:
    """Longest first to the rank with the least work that has room; returns what is held back.

    Held back are the shortest, about 3/4 of a tile for each rank, and what fits no rank.
    """
    room = group.room
    held: list[_Share] = []
    wanted = 3 * TILE // 4 * len(room)
    while shares and wanted > 0 and shares[-1].rows <= 4 * TILE:
        wanted -= shares[-1].rows
        held.append(shares.pop())
    least = [(0, rank) for rank in range(len(room))]
    for share in shares:
        minus_cost, document, rows, chunks = share
        full = []
        while least and room[least[0][1]] < rows:
            full.append(heapq.heappop(least))
        if least:
            cost, rank = least[0]
            heapq.heapreplace(least, (cost - minus_cost, rank))
            room[rank] -= rows
            group.cost[rank] -= minus_cost
            for chunk in chunks:
                group.chunks.append((rank, document, *chunk))
        else:
            held.append(share)
        for entry in full:
            heapq.heappush(least, entry)
    return held


def _equalise(group: _Group, held: list[_Share], longs: list[_Long]) -> list[int]:
    """Fill the ranks with what was held back until each misses only tiles of the longest pieces.

    Returns:
        Tiles that each rank misses, together those of ``longs`` (one of which may lose some of
        its first tiles here).
    """
    ranks = range(len(group.room))
    pieces = [(share.document, *chunk) for share in held for chunk in share.chunks]
    tiles_of = [room // TILE for room in group.room]
    missing = sum(long.tiles for long in longs) - sum(tiles_of)
    if missing > 0:
        # Too little was held back: the head of the longest piece is as cheap as a short piece.
        long = longs[0]
        pieces.append((long.document, *long.rows(0, missing)))
        long.tiles -= missing
        long.head += TILE * missing
    for _ in range(-missing):
        rank = max(ranks, key=lambda rank: (tiles_of[rank], group.cost[rank], -rank))
        tiles_of[rank] -= 1
    needs = [room - TILE * tiles for room, tiles in zip(group.room, tiles_of, strict=True)]
    pieces.sort(key=lambda each: (each[1] - each[2], each))
    unfit = []
    for document, start, stop in pieces:
        fitting = [rank for rank in ranks if needs[rank] >= stop - start]
        if not fitting:
            unfit.append((document, start, stop))
            continue
        rank = min(fitting, key=group.cost.__getitem__)
        group.add(rank, document, (start, stop), _segment_cost(stop - start, stop))
        needs[rank] -= stop - start
    # What fits nowhere whole goes round the ranks and is cut where one is full.
    for rank in sorted(ranks, key=lambda rank: (-needs[rank], rank)):
        while needs[rank]:
            document, start, stop = unfit.pop()
            end = min(stop, start + needs[rank])
            group.add(rank, document, (start, end), _segment_cost(end - start, end))
            needs[rank] -= end - start
            if end < stop:
                unfit.append((document, end, stop))
    assert not unfit
    return tiles_of


def _deal_longs(group: _Group, longs: list[_Long], tiles_of: list[int]) -> None:
    """Give every rank its missing tiles so that its work comes to the mean."""
    ranks = range(len(group.room))
    costs = [long.cost(0, long.tiles) for long in longs]
    mean = (sum(group.cost) + sum(costs)) // len(ranks)
    later_cost, later_tiles = sum(costs), sum(tiles_of)
    for long, cost in zip(longs, costs, strict=True):
        counts = _apportioned(long.tiles, tiles_of, later_tiles)
        later_cost -= cost
        later_tiles -= long.tiles
        # What this piece should cost a rank if the later ones cost it their average.
        wanted = [mean - spent for spent in group.cost]
        for rank in ranks:
            tiles_of[rank] -= counts[rank]
            if later_tiles:
                wanted[rank] -= later_cost * tiles_of[rank] // later_tiles
        front, back = 0, long.tiles
        # Ranks that want what is far from the piece's average go while both its ends are there.
        average = cost // long.tiles
        order = sorted(
            (rank for rank in ranks if counts[rank]),
            key=lambda rank: (-abs(wanted[rank] // counts[rank] - average), rank),
        )
        for rank in order:
            count = counts[rank]
            early = _front_tiles(long, front, back, count, wanted[rank])
            for first, last in ((front, front + early), (back - (count - early), back)):
                if first < last:
                    rows = long.rows(first, last)
                    group.add(rank, long.document, rows, long.cost(first, last))
            front += early
            back -= count - early


def _apportioned(tiles: int, shares: list[int], total: int) -> list[int]:
    """``tiles`` divided in proportion to ``shares``, by largest remainder."""
    parts = [divmod(tiles * share, total) for share in shares]
    counts = [whole for whole, _ in parts]
    largest = sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))
    for index in largest[: tiles - sum(counts)]:
        counts[index] += 1
    return counts


def _front_tiles(long: _Long, front: int, back: int, count: int, wanted: int) -> int:
    """How many of a rank's ``count`` tiles to take from the front so that they cost ``wanted``."""
    if back - front == count:
        return count
    step = UNITS * (back - front - count)
    early = (2 * (long.cost(back - count, back) - wanted) + step) // (2 * step)
    early = min(max(early, 0), count)
    # One tile alone costs more: none or two instead.
    if count >= LEAST_TILES:
        if early == 1:
            early = 2
        elif early == count - 1:
            early = count - 2
    elif early in (1, count - 1):
        early = 0 if early == 1 else count
    return early
