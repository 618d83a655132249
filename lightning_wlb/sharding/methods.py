"""The shardings with a closed form: chunk pairs, and tiles dealt by work.

**Chunk pairs** (``per_sequence``, ``per_document``, ``per_document_contiguous``). Under causal
attention chunk c of 2·CP equal chunks reads c earlier chunks and half of itself, so the pair c and
2·CP - 1 - c is the same work for every c. Every rank gets such a pair.

**Tiles** (``ptrr``, torch's PTRR balancer). The concatenated micro-batch is cut in tiles of 128
rows. Tiles are dealt in descending work, one to each rank in a round, and every other round goes
the other way, so that every rank gets equally many tiles and nearly equal work. Rows that do not
divide form a last round of smaller, equal tiles. Most segments are one tile with keys of its own,
and most keys are sent to every rank, so the total work is more than with other shardings, but
evenly spread. Use it for micro-batches that the others leave unequal, but not for a document that
fills most of the window: a rank with n tiles of it then reads its keys n/2 times.

Cost: vectorised, linear in chunks; one heap operation for each remainder, one sort of the tiles.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps

import numpy as np

from lightning_wlb.cost.attention_tiles import TILE, reference_kernel_cost
from lightning_wlb.sharding.integer_ranges import Integers, cut, offsets, ranges

Sharding = Callable[[Sequence[Integers], int], Integers]
"""(lengths of the pieces of each micro-batch in tokens, ranks) -> chunks int64 [chunks, 4].

The columns are rank, piece, first token and end of a chunk, tokens counted from the piece's start.
Ranks and pieces are numbered over all micro-batches: the ranks of micro-batch i from i·ranks on.
Every token belongs to exactly one chunk, and no chunk is empty. Chunks may have any order and may
be adjacent: :func:`.layout` merges them. A micro-batch has at least one piece.
"""

MOST_REMEMBERED = 1 << 12
"""Micro-batches whose chunks are remembered, kilobytes each: enough for some thousand ranks."""


def one_by_one(chunks_of: Callable[[Integers, int], Integers]) -> Sharding:
    """A sharding made of a function that cuts one micro-batch at a time.

    Results depend only on the lengths and the ranks, and are remembered by these: choosing a
    sharding, predicting memory and making tensors all ask for them, and equal lengths recur.
    """

    @lru_cache(MOST_REMEMBERED)
    def of_one(lengths: tuple[int, ...], ranks: int) -> Integers:
        return chunks_of(np.array(lengths, dtype=np.int64), ranks)

    @wraps(chunks_of)
    def of_each(lengths: Sequence[Integers], ranks: int) -> Integers:
        tables = [of_one(tuple(each.tolist()), ranks) for each in lengths]
        first = offsets(np.array(list(map(len, lengths))))[:-1]
        shift = np.stack((ranks * np.arange(len(lengths)), first, 0 * first, 0 * first), axis=1)
        return np.concatenate(tables) + np.repeat(shift, list(map(len, tables)), axis=0)

    return of_each


def _owners(ranks: int) -> Integers:
    """The rank of each of 2·ranks chunks."""
    numbers = np.arange(2 * ranks)
    return np.minimum(numbers, 2 * ranks - 1 - numbers)


def per_sequence(lengths: Sequence[Integers], ranks: int) -> Integers:
    """Cut the concatenated pieces in 2·ranks nearly equal chunks, whatever they hold (Llama 3).

    Segments are few and long, which kernels like; attention is unequal as soon as there are several
    documents. Use it where every micro-batch is one document or attention hardly counts.
    """
    totals = _totals(lengths)
    cuts = totals[:, None] * np.arange(2 * ranks) // (2 * ranks) + offsets(totals)[:-1, None]
    chunks = cut(np.concatenate(lengths), cuts.ravel())
    number, chunk = np.divmod(chunks[:, 0], 2 * ranks)
    chunks[:, 0] = ranks * number + _owners(ranks)[chunk]
    return chunks


@one_by_one
def per_document(lengths: Integers, ranks: int) -> Integers:
    """Cut every piece; single tokens of the remainder go round the ranks (WLB-LLM §5.1).

    Work is equal, but every such token is a segment of its own with a copy of the keys of its whole
    piece, and a GPU kernel rounds it up to a full tile of queries.
    """
    size = lengths // (2 * ranks)
    rest = lengths - 2 * ranks * size
    token = ranges(2 * ranks * size, rest)
    document = np.repeat(np.arange(len(lengths)), rest)
    turn = np.arange(len(token)) % ranks
    single = np.stack((turn, document, token, token + 1), axis=1)
    return np.concatenate((_pairs(size, ranks), single))


@one_by_one
def per_document_contiguous(lengths: Integers, ranks: int) -> Integers:
    """Cut every piece; its remainder goes as one chunk to the rank with the fewest rows.

    A chunk that would give the rank more than its share of all remainders is cut there, so that no
    rank has more rows than the mean, rounded up. Ties go to the rank whose remainders have the
    fewest attention pairs, which spreads the work; then to the lowest rank.
    """
    size = lengths // (2 * ranks)
    paired = 2 * ranks * size
    # The pairs give every rank equally many rows, so only remainders are counted.
    most = -(-int((lengths - paired).sum()) // ranks)
    ranked = [(0, 0, rank) for rank in range(ranks)]
    remainders = []
    for piece, (at, stop) in enumerate(zip(paired.tolist(), lengths.tolist(), strict=True)):
        while at < stop:
            rows, pairs, rank = ranked[0]
            end = min(stop, at + most - rows)
            remainders.append((rank, piece, at, end))
            pairs += (end * (end + 1) - at * (at + 1)) // 2
            heapq.heapreplace(ranked, (rows + end - at, pairs, rank))
            at = end
    chunks = np.array(remainders, dtype=np.int64).reshape(-1, 4)
    return np.concatenate((_pairs(size, ranks), chunks))


def _pairs(size: Integers, ranks: int) -> Integers:
    """Chunks r and 2·ranks - 1 - r of each piece for each rank r; a chunk has ``size`` tokens."""
    document = np.flatnonzero(size)
    size = size[document, None]
    start = np.arange(2 * ranks) * size
    chunks = np.empty((*start.shape, 4), dtype=np.int64)
    for column, values in enumerate((_owners(ranks), document[:, None], start, start + size)):
        chunks[..., column] = values
    return chunks.reshape(-1, 4)


def ptrr(lengths: Sequence[Integers], ranks: int) -> Integers:
    """Deal tiles of the concatenated pieces in rounds of alternating direction, by work."""
    totals = _totals(lengths)
    # As many rounds of whole tiles as there are, and a last round of equal smaller tiles.
    whole = totals // (TILE * ranks) * ranks
    rest = totals - TILE * whole
    tiles = whole + ranks * (rest > 0)
    first = offsets(tiles)
    number = np.repeat(np.arange(len(totals)), tiles)  # micro-batch of each tile
    place = np.arange(first[-1]) - first[number]
    behind = np.maximum(place - whole[number], 0)
    cuts = TILE * np.minimum(place, whole[number]) + rest[number] * behind // ranks
    # A tile with the ends of pieces in it is several segments.
    chunks = cut(np.concatenate(lengths), cuts + offsets(totals)[number])
    tile, _, start, stop = chunks.T
    cost = offsets(reference_kernel_cost(stop - start, stop))
    cost = np.diff(cost[np.searchsorted(tile, np.arange(first[-1] + 1))])
    # The smaller tiles are the last round, else rows would not be equal. Ties go by number.
    order = np.lexsort((-cost, place >= whole[number], number))
    there_and_back = np.concatenate((np.arange(ranks), np.arange(ranks)[::-1]))
    owner = np.empty_like(order)
    owner[order] = there_and_back[place % (2 * ranks)] + ranks * number
    chunks[:, 0] = owner[tile]
    return chunks


def _totals(lengths: Sequence[Integers]) -> Integers:
    """Tokens of each micro-batch, int64 [micro-batches]."""
    return np.array([each.sum() for each in lengths], dtype=np.int64)
