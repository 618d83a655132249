"""The shardings with a closed form: chunk pairs, tiles dealt by work, and equal ranges for heads.

**Chunk pairs** (``per_sequence``, ``per_document``, ``per_document_contiguous``). Under causal
attention chunk c of 2·CP equal chunks reads c earlier chunks and half of itself, so the pair c and
2·CP - 1 - c is the same work for every c. Every rank gets such a pair.

**Tiles** (``ptrr``, torch's PTRR balancer). The concatenated micro-batch is cut in tiles of 128
rows. Tiles are dealt in descending work, one to each rank in a round, and every other round goes
the other way, so that every rank gets equally many tiles and nearly equal work. Rows that do not
divide are a last round of smaller, equal tiles. Most segments are one tile with keys of its own,
and most keys are sent to every rank, so the total work is more than with other shardings, but
evenly spread. It is for sequences on which those fail, and not for a document as long as most of
the window: the tiles of a rank then read half as many copies of it as there are tiles.

**Equal ranges** (``heads``, DeepSpeed Ulysses). Each rank holds one range of the concatenated
pieces. Around the kernel an all-to-all turns "all heads of some rows" into "some heads of all rows"
(:mod:`lightning_wlb.attention.ulysses`). Every rank computes whole pieces, so that work is equal
whatever the lengths are and no key is copied. A rank sends
rows · (ranks - 1) · (2 · heads / ranks + 2 · key/value heads of a rank) · head_dim elements,
whatever the pieces are; an exchange of keys sends at most rows · (ranks - 1) · 2 · kv_heads ·
head_dim. So this pays for models with about as many key/value heads as query heads and for many
ranks, and not where several query heads share a key/value head. Not for more ranks than heads.
Slices of a piece, and micro-batches that several replicas share, exchange keys all the same: no
other rank's cache holds a rank's part of the heads.

Cost: vectorised, linear in chunks; one heap operation for each remainder, one sort of the tiles.
"""

from __future__ import annotations

import heapq

import numpy as np

from lightning_wlb.cost.attention_tiles import TILE, reference_kernel_cost
from lightning_wlb.sharding.integer_ranges import Integers, cut, ranges


def _owners(ranks: int) -> Integers:
    """The rank of each of 2·ranks chunks."""
    numbers = np.arange(2 * ranks)
    return np.minimum(numbers, 2 * ranks - 1 - numbers)


def per_sequence(lengths: Integers, ranks: int) -> Integers:
    """Cut the concatenated pieces in 2·ranks nearly equal chunks, whatever lies in them (Llama 3).

    Segments are few and long, which kernels like; attention is unequal as soon as there are several
    documents. Use it where every micro-batch is one document or attention hardly counts.
    """
    chunks = cut(lengths, int(lengths.sum()) * np.arange(2 * ranks + 1) // (2 * ranks))
    chunks[:, 0] = _owners(ranks)[chunks[:, 0]]
    return chunks


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


def per_document_contiguous(lengths: Integers, ranks: int) -> Integers:
    """Cut every piece; its remainder goes as one chunk to the rank with the fewest rows.

    Where that would give the rank more than its share of all remainders, the chunk is cut there, so
    that no rank has more rows than the mean, rounded up. Ties go to the rank whose remainders have
    the fewest attention pairs, so that it is not always the same ranks that have more work; then to
    the lowest.
    """
    size = lengths // (2 * ranks)
    starts = 2 * ranks * size
    # The paired part gives every rank the same, so only remainders are counted.
    most = -(-int((lengths - starts).sum()) // ranks)
    ranked = [(0, 0, rank) for rank in range(ranks)]
    remainders = []
    for document, (start, stop) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        at = start
        while at < stop:
            rows, pairs, rank = ranked[0]
            end = min(stop, at + most - rows)
            remainders.append((rank, document, at, end))
            pairs += (end * (end + 1) - at * (at + 1)) // 2
            heapq.heapreplace(ranked, (rows + end - at, pairs, rank))
            at = end
    return np.concatenate(
        (_pairs(size, ranks), np.array(remainders, dtype=np.int64).reshape(-1, 4))
    )


def _pairs(size: Integers, ranks: int) -> Integers:
    """Chunks r and 2·ranks - 1 - r of each piece for each rank r; a chunk has ``size`` tokens."""
    document = np.flatnonzero(size)
    size = size[document, None]
    start = np.arange(2 * ranks) * size
    columns = (_owners(ranks), document[:, None], start, start + size)
    return np.stack(np.broadcast_arrays(*columns), axis=2).reshape(-1, 4)


def ptrr(lengths: Integers, ranks: int) -> Integers:
    """Deal tiles of the concatenated pieces in rounds of alternating direction, by work."""
    total = int(lengths.sum())
    divisible = total // (TILE * ranks) * ranks * TILE
    cuts = np.arange(0, divisible, TILE)
    if divisible < total:
        rest = divisible + (total - divisible) * np.arange(ranks) // ranks
        cuts = np.concatenate((cuts, rest))
    # A tile with the ends of pieces in it is several segments.
    tile, document, start, stop = cut(lengths, cuts).T
    cost = np.zeros(len(cuts), dtype=np.int64)
    np.add.at(cost, tile, reference_kernel_cost(stop - start, stop))
    owner = _deal(cost, divisible // TILE, ranks)
    return np.stack((owner[tile], document, start, stop), axis=1)


def _deal(cost: Integers, whole: int, ranks: int) -> Integers:
    """The rank of each tile; the first ``whole`` tiles have 128 rows. Ties go by number."""
    order = np.argsort(-cost, kind="stable")
    # The smaller tiles are the last round, or rows would not be equal.
    order = np.concatenate((order[order < whole], order[order >= whole]))
    there_and_back = np.concatenate((np.arange(ranks), np.arange(ranks)[::-1]))
    owner = np.empty(len(cost), dtype=np.int64)
    owner[order] = np.resize(there_and_back, len(cost))
    return owner


HEADS = "heads"
"""The name of this sharding."""


def equal_ranges(lengths: Integers, ranks: int) -> Integers:
    """One range of the concatenated pieces for each rank, equal to within a token."""
    return cut(lengths, int(lengths.sum()) * np.arange(ranks + 1) // ranks)


def check_heads(
    heads: int, kv_heads: int, context_parallel_size: int, tensor_parallel_size: int = 1
) -> None:
    """Refuse heads that cannot be split over the context-parallel ranks.

    Args:
        heads: query heads, over all tensor-parallel ranks.
        kv_heads: key/value heads, over all tensor-parallel ranks.
        context_parallel_size: ranks that split the heads of a tensor-parallel rank.
        tensor_parallel_size: ranks that split the heads first.

    Raises:
        ValueError: if they do not divide; names the numbers and the remedy.
    """
    own, own_keys = heads // tensor_parallel_size, max(kv_heads // tensor_parallel_size, 1)
    size = context_parallel_size
    if own % size or (own_keys % size and size % own_keys):
        raise ValueError(
            f"sharding={HEADS!r} splits the {own} query and {own_keys} key/value heads of a"
            f" tensor-parallel rank over {size} context-parallel ranks, and they do not divide."
            f" Choose a context_parallel_size that divides {own} and divides {own_keys} or is a"
            " multiple of it, or another sharding, such as 'adaptive'."
        )
