"""The shardings of chunk pairs: per sequence, and per document with either rule for remainders.

Under causal attention chunk c of 2·CP equal chunks reads c earlier chunks and half of itself, so
the pair c and 2·CP - 1 - c is the same work for every c; every rank gets such a pair.

Cost: vectorised, linear in chunks; one heap operation for each remainder.
"""

from __future__ import annotations

import heapq

import numpy as np

from lightning_wlb.sharding.arrays import Integers, distinct, offsets, ranges


def _owners(ranks: int) -> Integers:
    numbers = np.arange(2 * ranks)
    return np.minimum(numbers, 2 * ranks - 1 - numbers)


def per_sequence(lengths: Integers, ranks: int) -> Integers:
    """Cut the concatenated pieces in 2·ranks nearly equal chunks, whatever lies where.

    Few, long segments, which kernels like, and unequal attention as soon as there are several
    documents. Use it where every micro-batch is one document or attention hardly counts.
    """
    first = offsets(lengths)
    cuts = first[-1] * np.arange(2 * ranks + 1) // (2 * ranks)
    bounds = distinct(first, cuts)
    start, stop = bounds[:-1], bounds[1:]
    document = np.searchsorted(first, start, side="right") - 1
    owner = _owners(ranks)[np.searchsorted(cuts, start, side="right") - 1]
    return np.stack((owner, document, start - first[document], stop - first[document]), axis=1)


def per_document(lengths: Integers, ranks: int) -> Integers:
    """Cut every piece; single tokens of the remainder go round the ranks (WLB-LLM §5.1).

    Equal work, but every such token is a segment of its own that reads the keys of its whole
    piece again; a GPU kernel rounds it up to a full tile of queries.
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

    Where that would give the rank more than its share of all remainders, the chunk is cut there
    (for fewer than ``ranks`` remainders in all), so no rank has more
    rows than the mean, rounded up.

    Equal rows go by the attention pairs of the remainders a rank already has, so that the ranks
    that got more work in one micro-batch are not the same in all of them; then by rank.
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
    """Chunks r and 2·ranks - 1 - r of ``size`` tokens of each piece to each rank r."""
    document = np.flatnonzero(size)
    size = size[document, None]
    start = np.arange(2 * ranks) * size
    columns = (_owners(ranks), document[:, None], start, start + size)
    return np.stack(np.broadcast_arrays(*columns), axis=2).reshape(-1, 4)
