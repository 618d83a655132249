"""Long pieces cut between ranks at tile boundaries, short ones whole on one rank.

A kernel computes queries in tiles of 128 rows, so that a cut between tiles is free as long as both
sides keep two tiles, and any other cut costs about one more tile. So

1. pieces whose work is a small share of a rank's work stay whole: longest first, each goes to the
   rank with the least work that has room for its rows;
2. a larger piece is cut at tile boundaries counted from its *end*, which leaves its partial tile at
   the head. That head reads one key/value tile and is dealt like any short piece. A piece of few
   tiles is cut into just enough shares to make each small; a share is a pair of chunks from both
   ends (early and late tiles together are average work), and is dealt like a whole piece;
3. the shortest pieces are held back. They fill every rank until it misses only whole tiles. A piece
   that does not fit is cut: token counts differ by at most one, which costs a rank one cheap tile;
4. the longest pieces give every rank the tiles that it misses, in pairs from both ends. Taking a
   tile from the front instead of the back changes a rank's work, by the same amount for each tile,
   but not its rows. So the number of front tiles that brings a rank's work to the mean has a closed
   form; the next, shorter piece evens out the rounding.

A small share is 1/8 of a rank's work; if that does not balance well enough, 1/32 is tried too.
Whole pieces need no keys of other ranks, so the larger share comes first.

The sharding optimises the reference kernel cost, which is a model: measure on your device. It gains
nothing on micro-batches of a few tiles per rank, where there is nothing to align.

Cost: plain Python over pieces and ranks, O((pieces + ranks) · ranks).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_wlb.cost.attention_tiles import OVERHEAD, TILE, UNITS
from lightning_wlb.sharding.integer_ranges import Integers
from lightning_wlb.sharding.methods import one_by_one

WHOLE_SHARES = (8, 32)
"""A piece stays whole up to 1/8 of a rank's work, or up to 1/32; tried in this order."""

GOOD_PERMILLE = 20
"""A share is good enough if no rank exceeds the mean work by more than this."""

LEAST_TILES = 4
"""Tiles of a rank's share of a cut piece: two from each end, so that no segment is one tile."""

_Rows = tuple[int, int]
"""First token and end of a chunk, counted from the piece's start."""


class _Share(NamedTuple):
    """Chunks of one piece that go to one rank together; shares sort in the order of dealing."""

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

    def rows(self, first: int, last: int) -> _Rows:
        """Tokens of tiles [first, last)."""
        return self.head + TILE * first, self.head + TILE * last


@dataclass(slots=True)
class _Deal:
    """The rows that each rank has room for, its work so far, and the chunks that were dealt."""

    room: list[int]
    cost: list[int]
    chunks: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, rank: int, document: int, start: int, stop: int) -> None:
        self.chunks.append((rank, document, start, stop))
        self.room[rank] -= stop - start
        self.cost[rank] += _cost(start, stop)


@one_by_one
def hybrid(lengths: Integers, ranks: int) -> Integers:
    """Cut long pieces at tile boundaries, keep short ones whole, equalise rows and work."""
    # Most micro-batches have too few pieces for numpy to pay.
    sizes = lengths.tolist()
    costs = [_cost(0, size) for size in sizes]
    deals = []
    for share in WHOLE_SHARES:
        deal = _dealt(sizes, costs, ranks, share)
        deals.append(deal)
        if 1000 * ranks * max(deal.cost) <= (1000 + GOOD_PERMILLE) * sum(deal.cost):
            break
    best = min(deals, key=lambda each: max(each.cost))
    return np.array(best.chunks, dtype=np.int64)


def _dealt(lengths: list[int], costs: list[int], ranks: int, share: int) -> _Deal:
    """Deal all chunks; a piece stays whole up to 1/``share`` of a rank's work."""
    tokens, total = sum(lengths), sum(costs)
    deal = _Deal(
        room=[tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)], cost=[0] * ranks
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
            shares.append(_Share(-_cost(0, head), document, head, ((0, head),)))
        long = _Long(tiles, document, head)
        if tiles >= LEAST_TILES * ranks:
            longs.append(long)
        else:
            parts = max(-(-work // total), -(-4 * length * ranks // tokens))
            _cut(long, min(parts, tiles // LEAST_TILES), shares)
    shares.sort()
    longs.sort(key=lambda each: (-each.tiles, each.document))
    held = _deal_shares(deal, shares)
    tiles_of = _equalise(deal, held, longs)
    _deal_longs(deal, longs, tiles_of)
    return deal


def _cost(start: int, stop: int) -> int:
    """:func:`.reference_kernel_cost` of one chunk, in fewer operations."""
    tiles = -(-(stop - start) // TILE)
    before = -(-start // TILE)
    read = (tiles - 1) * before + tiles * (tiles - 1) // 2 - (-stop // TILE)
    return UNITS * OVERHEAD * tiles + (UNITS + (tiles == 1)) * read


def _cut(long: _Long, parts: int, shares: list[_Share]) -> None:
    """Append equal shares of a piece: pairs of chunks from both ends, and last its middle."""
    front, back = 0, long.tiles
    for left in range(parts, 0, -1):
        tiles = (back - front) // left
        first, last = front + tiles // 2, back - (tiles - tiles // 2)
        ends = ((front, first), (last, back)) if left > 1 else ((front, back),)
        chunks = tuple(long.rows(*each) for each in ends)
        cost = sum(_cost(*each) for each in chunks)
        shares.append(_Share(-cost, long.document, TILE * tiles, chunks))
        front, back = first, last


def _deal_shares(deal: _Deal, shares: list[_Share]) -> list[_Share]:
    """Deal shares, longest first, to the rank with the least work that has room.

    Returns the shares that are held back: the shortest ones, about 3/4 of a tile for each rank
    (without them work is less even), and those that fit no rank.
    """
    room = deal.room
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
            deal.cost[rank] -= minus_cost
            deal.chunks += [(rank, document, *chunk) for chunk in chunks]
        else:
            held.append(share)
        for entry in full:
            heapq.heappush(least, entry)
    return held


def _equalise(deal: _Deal, held: list[_Share], longs: list[_Long]) -> list[int]:
    """Fill the ranks with the shares held back until each misses only tiles of the longest pieces.

    Returns each rank's missing tiles, in sum those of ``longs``, whose first may be shortened.
    """
    ranks = range(len(deal.room))
    pieces = [(share.document, *chunk) for share in held for chunk in share.chunks]
    tiles_of = [room // TILE for room in deal.room]
    missing = sum(long.tiles for long in longs) - sum(tiles_of)
    if missing > 0:
        # Too little was held back: the head of the longest piece is as cheap as a short piece.
        long = longs[0]
        pieces.append((long.document, *long.rows(0, missing)))
        long.tiles -= missing
        long.head += TILE * missing
    for _ in range(-missing):
        rank = max(ranks, key=lambda rank: (tiles_of[rank], deal.cost[rank], -rank))
        tiles_of[rank] -= 1
    needs = [room - TILE * tiles for room, tiles in zip(deal.room, tiles_of, strict=True)]
    pieces.sort(key=lambda each: (each[1] - each[2], each))
    unfit = []
    for document, start, stop in pieces:
        fitting = [rank for rank in ranks if needs[rank] >= stop - start]
        if not fitting:
            unfit.append((document, start, stop))
            continue
        rank = min(fitting, key=deal.cost.__getitem__)
        deal.add(rank, document, start, stop)
        needs[rank] -= stop - start
    # Pieces that fit on no rank whole fill one rank after another, cut where a rank is full.
    for rank in sorted(ranks, key=lambda rank: (-needs[rank], rank)):
        while needs[rank]:
            document, start, stop = unfit.pop()
            end = min(stop, start + needs[rank])
            deal.add(rank, document, start, end)
            needs[rank] -= end - start
            if end < stop:
                unfit.append((document, end, stop))
    assert not unfit
    return tiles_of


def _deal_longs(deal: _Deal, longs: list[_Long], tiles_of: list[int]) -> None:
    """Give every rank its missing tiles, so that its work comes to the mean."""
    ranks = range(len(deal.room))
    costs = [_cost(*long.rows(0, long.tiles)) for long in longs]
    mean = (sum(deal.cost) + sum(costs)) // len(ranks)
    later_cost, later_tiles = sum(costs), sum(tiles_of)
    for long, cost in zip(longs, costs, strict=True):
        counts = _apportioned(long.tiles, tiles_of, later_tiles)
        later_cost -= cost
        later_tiles -= long.tiles
        # What each rank should get of this piece if its tiles of later pieces cost their average.
        wanted = [mean - spent for spent in deal.cost]
        for rank in ranks:
            tiles_of[rank] -= counts[rank]
            if later_tiles:
                wanted[rank] -= later_cost * tiles_of[rank] // later_tiles
        front, back = 0, long.tiles
        # Ranks that need tiles far from the piece's average choose first, while both ends are left.
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
                    deal.add(rank, long.document, *long.rows(first, last))
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
    early = (2 * (_cost(*long.rows(back - count, back)) - wanted) + step) // (2 * step)
    early = min(max(early, 0), count)
    # A segment of one tile costs more: none or two instead.
    if count >= LEAST_TILES:
        if early == 1:
            early = 2
        elif early == count - 1:
            early = count - 2
    elif early in (1, count - 1):
        early = 0 if early == 1 else count
    return early
