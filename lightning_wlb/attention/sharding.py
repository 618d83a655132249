"""Which tokens of a micro-batch live on which context-parallel rank, as index arithmetic.

A micro-batch is a list of pieces. A *sharding* cuts the pieces into *chunks* (a range of tokens
of one piece) and deals them to the ranks of the context-parallel group. Under causal attention
chunk c of 2·CP equal chunks reads c earlier chunks and half of itself, so the pair c and
2·CP - 1 - c is the same work for every c: every sharding here deals such pairs.

* ``per_sequence``: the concatenated micro-batch is cut, whatever document lies where. Few, long
  segments, which kernels like, and unequal attention as soon as there are several documents. Use
  it where every micro-batch is one document or attention hardly counts.
* ``per_document`` (WLB-LLM §5.1): every piece is cut, and the tokens that do not divide are dealt
  one by one. Equal work, but every such token is a segment of its own that gathers the keys of
  its whole piece again; a GPU kernel rounds it up to a full tile of queries.
* ``per_document_contiguous``: as before with the tokens that do not divide kept together, on the
  rank that has the fewest rows so far. At most 2·CP - 1 rows from equal, with one segment per
  remainder. The default. Not for micro-batches of a few hundred tokens per rank, where 2·CP - 1
  rows are a real share.

The rows of a rank are its chunks one after another, padded at the end so that all ranks have
equally many and tensor parallelism can divide them. Each chunk is one attention segment: its
queries are the chunk's rows, its keys the piece from its start to the chunk's end, causal and
aligned at the bottom right (the last query sees every key).

Cost: linear in chunks for :func:`layout`, in keys for :func:`rank_indices` (vectorised; about
T·(1 + 1/(2·CP)) keys for T tokens under ``per_document_contiguous``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Chunk(NamedTuple):
    """Tokens ``[start, stop)`` of a piece, counted from the piece's own start.

    ``document`` is the piece's index within the micro-batch.
    """

    document: int
    start: int
    stop: int


def _per_sequence(lengths: Sequence[int], ranks: int) -> list[list[Chunk]]:
    """Cut the concatenated pieces in 2·ranks nearly equal chunks (the Llama 3 way)."""
    total = sum(lengths)
    cuts = [total * number // (2 * ranks) for number in range(2 * ranks + 1)]
    owners = [min(number, 2 * ranks - 1 - number) for number in range(2 * ranks)]
    chunks: list[list[Chunk]] = [[] for _ in range(ranks)]
    number = 0
    piece_start = 0
    for document, length in enumerate(lengths):
        at = piece_start
        piece_stop = piece_start + length
        while at < piece_stop:
            while cuts[number + 1] <= at:
                number += 1
            stop = min(cuts[number + 1], piece_stop)
            chunks[owners[number]].append(Chunk(document, at - piece_start, stop - piece_start))
            at = stop
        piece_start = piece_stop
    return chunks


def _paired(chunks: list[list[Chunk]], document: int, size: int) -> None:
    """Append chunks r and 2·ranks - 1 - r, each of ``size`` tokens, of a piece to each rank r."""
    last = 2 * len(chunks) - 1
    for rank, mine in enumerate(chunks):
        for number in (rank, last - rank):
            mine.append(Chunk(document, number * size, (number + 1) * size))


def _per_document(lengths: Sequence[int], ranks: int) -> list[list[Chunk]]:
    """Cut every piece; single tokens of the remainder go round the ranks (WLB-LLM §5.1)."""
    chunks: list[list[Chunk]] = [[] for _ in range(ranks)]
    turn = 0
    for document, length in enumerate(lengths):
        size = length // (2 * ranks)
        if size:
            _paired(chunks, document, size)
        for token in range(2 * ranks * size, length):
            chunks[turn].append(Chunk(document, token, token + 1))
            turn = (turn + 1) % ranks
    return chunks


def _per_document_contiguous(lengths: Sequence[int], ranks: int) -> list[list[Chunk]]:
    """Cut every piece; its remainder goes as one chunk to the rank with the fewest rows.

    Equal rows go by the attention pairs of the remainders a rank already has, so that the ranks
    that got more work in one micro-batch are not the same in all of them; then by rank.
    """
    chunks: list[list[Chunk]] = [[] for _ in range(ranks)]
    # The paired part gives every rank the same, so only remainders are counted.
    rows, pairs = [0] * ranks, [0] * ranks
    for document, length in enumerate(lengths):
        size = length // (2 * ranks)
        if size:
            _paired(chunks, document, size)
        start = 2 * ranks * size
        if start == length:
            continue
        rank = min(range(ranks), key=lambda rank: (rows[rank], pairs[rank], rank))
        chunks[rank].append(Chunk(document, start, length))
        rows[rank] += length - start
        pairs[rank] += (length * (length + 1) - start * (start + 1)) // 2
    return chunks


SHARDINGS: dict[str, Callable[[Sequence[int], int], list[list[Chunk]]]] = {
    "per_sequence": _per_sequence,
    "per_document": _per_document,
    "per_document_contiguous": _per_document_contiguous,
}
"""(lengths of the pieces in tokens, ranks) -> chunks of each rank, in local row order.

A new sharding is a function and a line here. Every token belongs to exactly one chunk; chunks may
be adjacent, :func:`layout` merges them.
"""


@dataclass(frozen=True)
class Layout:
    """How the tokens of one micro-batch lie on a context-parallel group.

    Args:
        lengths: length in tokens of each piece.
        chunks: for each rank its chunks in local row order, none empty, none adjacent to its
            predecessor.
        rows: rows of each rank after padding at the local end.
    """

    lengths: tuple[int, ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    rows: int


def layout(
    sharding: str,
    lengths: Sequence[int],
    context_parallel_size: int,
    tensor_parallel_size: int,
) -> Layout:
    """Spread the pieces of a micro-batch over the context-parallel group.

    Args:
        sharding: a name in :data:`SHARDINGS`.
        lengths: length in tokens of each piece, each at least 1; none for an empty micro-batch.
        context_parallel_size: ranks of the group.
        tensor_parallel_size: the padded rows are a multiple of it.

    Raises:
        ValueError: naming an unknown sharding and the known ones, or a size or length below 1.
    """
    if sharding not in SHARDINGS:
        raise ValueError(
            f"unknown sharding {sharding!r}; the known ones are {', '.join(sorted(SHARDINGS))}."
        )
    if context_parallel_size < 1 or tensor_parallel_size < 1:
        raise ValueError(
            f"context_parallel_size={context_parallel_size} and"
            f" tensor_parallel_size={tensor_parallel_size} must be at least 1."
        )
    lengths = tuple(int(length) for length in lengths)
    if lengths and min(lengths) < 1:
        raise ValueError(
            f"piece {lengths.index(min(lengths))} of the micro-batch has {min(lengths)} tokens;"
            " a piece has at least 1. Leave empty pieces out."
        )
    chunks = tuple(_merged(mine) for mine in SHARDINGS[sharding](lengths, context_parallel_size))
    most = max(sum(chunk.stop - chunk.start for chunk in mine) for mine in chunks)
    rows = -(-most // tensor_parallel_size) * tensor_parallel_size
    return Layout(lengths, chunks, rows)


def _merged(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Chunks with neighbours of one piece joined: one attention segment instead of several."""
    merged: list[Chunk] = []
    for chunk in chunks:
        if merged and merged[-1].document == chunk.document and merged[-1].stop == chunk.start:
            merged[-1] = Chunk(chunk.document, merged[-1].start, chunk.stop)
        else:
            merged.append(chunk)
    return tuple(merged)


@dataclass(frozen=True, eq=False)
class RankIndices:
    """What one rank of the context-parallel group holds and attends to.

    Args:
        document: int64 [queries], the piece of each real local row, in local order.
        offset: int64 [queries], its token, from the start of the piece.
        cu_seqlens_q: int32 [segments + 1], first query row of each segment, then their number.
        cu_seqlens_k: int32 [segments + 1], first key of each segment, then their number.
        max_seqlen_q: most queries of a segment.
        max_seqlen_k: most keys of a segment.
        key_index: int64 [keys], the row of the gathered keys and values
            [context_parallel_size · rows] that holds each key, in the order of ``cu_seqlens_k``.
    """

    document: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    cu_seqlens_k: npt.NDArray[np.int32]
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: npt.NDArray[np.int64]


def rank_indices(layout: Layout, rank: int) -> RankIndices:
    """The rows, attention segments and keys of one rank of the group.

    A rank without chunks has no rows and no segments; a segment is never empty.

    Raises:
        ValueError: if the layout has no such rank.
    """
    if not 0 <= rank < len(layout.chunks):
        raise ValueError(f"rank {rank} is not one of the layout's {len(layout.chunks)} ranks.")
    first_token = _offsets(np.array(layout.lengths, dtype=np.int64))
    row_of_token = np.empty(first_token[-1], dtype=np.int64)
    for owner, chunks in enumerate(layout.chunks):
        document, start, stop = _columns(chunks)
        tokens = _ranges(first_token[document] + start, stop - start)
        row_of_token[tokens] = owner * layout.rows + np.arange(len(tokens))
    document, start, stop = _columns(layout.chunks[rank])
    queries = stop - start
    return RankIndices(
        document=np.repeat(document, queries),
        offset=_ranges(start, queries),
        cu_seqlens_q=_offsets(queries).astype(np.int32),
        cu_seqlens_k=_offsets(stop).astype(np.int32),
        max_seqlen_q=int(queries.max(initial=0)),
        max_seqlen_k=int(stop.max(initial=0)),
        key_index=row_of_token[_ranges(first_token[document], stop)],
    )


def _columns(
    chunks: Sequence[Chunk],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Document, start and stop of the chunks as arrays."""
    table = np.array(chunks, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each of several concatenated ranges begins, then where the last one ends."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))


def _ranges(start: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``[start, start + length)`` of each row, concatenated."""
    ends = _offsets(length)
    shift = np.repeat(start - ends[:-1], length)
    return np.arange(len(shift), dtype=np.int64) + shift
