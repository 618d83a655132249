"""The shardings of chunk pairs: per sequence, and per document with either rule for remainders.

Under causal attention chunk c of 2·CP equal chunks reads c earlier chunks and half of itself, so
that the pair c and 2·CP - 1 - c is the same work for every c. Every rank gets such a pair.

Cost: vectorised, linear in chunks; one heap operation for each remainder.
"""

from __future__ import annotations

import heapq

import numpy as np

from lightning_wlb.sharding.arrays import Integers, cut, ranges


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
    that no rank has more rows than the mean, rounded up.

    Of ranks with equally many rows the one whose remainders have the fewest attention pairs comes
    first, so that the ranks with more work are not the same in all micro-batches; then the lowest.
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
