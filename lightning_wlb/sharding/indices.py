"""What one rank holds, attends to and exchanges, as arrays that kernels and collectives take.

Keys of other ranks arrive in one exchange. Rows of pieces that lie whole on one rank never travel.
Of the rest, either every rank gets all of it (all-gather, padded to the rank that has most), or
every rank gets just what its queries see (all-to-all, with sizes that differ). Both sides of every
message are computed here from the layout, so no rank asks another.

A query sees its piece up to itself, or with a sliding window the last so many of these tokens. So
of a chunk of another rank a rank reads nothing, or the end of it: what is in the window of the
first query that follows on the rank.

Cost: vectorised, linear in keys; 0.3 to 0.6 ms for 128K tokens on 16 ranks. A sliding window adds
a search for each chunk and rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_wlb.sharding.arrays import Integers, offsets, ranges
from lightning_wlb.sharding.layout import Layout

ALL_TO_ALL_PERCENT = 75
"""The all-to-all is used where its busiest rank moves at most this share of the all-gather's rows.

An all-gather runs at a higher share of a link's speed than messages of different sizes between
all pairs. By how much was not measured by this project.
"""


@dataclass(frozen=True, eq=False)
class RankIndices:
    """What one rank of the context-parallel group holds and attends to.

    The keys of its segments are rows of a buffer: first those that arrive from other ranks, then
    its own local rows, padding included.

    Args:
        document: int64 [queries], the piece of each real local row, in local order.
        offset: int64 [queries], its token, from the start of the piece.
        cu_seqlens_q: int32 [segments + 1], first query row of each segment, then their number.
        cu_seqlens_k: int32 [segments + 1], first key of each segment, then their number.
        max_seqlen_q: most queries of a segment.
        max_seqlen_k: most keys of a segment.
        key_index: int64 [keys], the row of the buffer that holds each key, in the order of
            ``cu_seqlens_k``.
        gathered: first local rows that every rank sends to all (all-gather); 0 where nothing
            travels, or by all-to-all.
        send_index: int64 [sum of send_counts], local rows to send, by receiving rank.
        send_counts: rows to send to each rank; empty where the all-to-all is not used.
        receive_counts: rows that arrive from each rank; empty where it is not used.
        head_rows: where heads and not keys are exchanged, rows of each rank; the segments are then
            the whole pieces, and there is no ``key_index``. Else empty.
    """

    document: Integers
    offset: Integers
    cu_seqlens_q: npt.NDArray[np.int32]
    cu_seqlens_k: npt.NDArray[np.int32]
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: Integers
    gathered: int
    send_index: Integers
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    head_rows: tuple[int, ...] = ()


def traffic(layout: Layout, sliding_window: int | None = None) -> Integers:
    """Rows [sender, receiver] that an all-to-all of just what is read moves between ranks."""
    return _moved(layout, _first_read(layout, sliding_window))


def _moved(layout: Layout, first_read: Integers) -> Integers:
    rows = layout.table[:, 3:] - first_read
    sums = np.zeros((len(rows) + 1, layout.ranks), dtype=np.int64)
    np.cumsum(rows, axis=0, out=sums[1:])
    moved: Integers = np.diff(sums[layout.first], axis=0)
    np.fill_diagonal(moved, 0)
    return moved


def uses_all_to_all(layout: Layout, moved: Integers) -> bool:
    """Whether keys travel by all-to-all; ``moved`` is :func:`traffic`, the same on all ranks."""
    busiest = max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return 100 * busiest <= ALL_TO_ALL_PERCENT * (layout.ranks - 1) * layout.shared


def rank_indices(layout: Layout, rank: int, sliding_window: int | None = None) -> RankIndices:
    """The rows, attention segments, keys and messages of one rank of the group.

    A rank without chunks has no rows and no segments; a segment is never empty.

    Args:
        layout: of the micro-batch.
        rank: in the group.
        sliding_window: most keys that a query sees, its own included; keys that no query of a
            segment sees are not among the segment's. None: no bound.

    Raises:
        ValueError: if the layout has no such rank.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank {rank} is not one of the layout's {layout.ranks} ranks.")
    owner, documents, starts, stops = layout.table.T
    lengths = stops - starts
    own = slice(int(layout.first[rank]), int(layout.first[rank + 1]))
    row = offsets(lengths)[:-1]
    row -= row[layout.first[:-1].clip(max=max(len(row) - 1, 0))][owner] if len(row) else 0
    document, stop, queries = documents[own], stops[own], lengths[own]

    gathered, arriving = 0, 0
    send_index = np.empty(0, dtype=np.int64)
    send_counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    place = row.copy()
    if layout.shared:
        first_read = _first_read(layout, sliding_window)
        moved = _moved(layout, first_read)
        if uses_all_to_all(layout, moved):
            send_index = _sent(layout, rank, row[own], first_read[own])
            send_counts = tuple(moved[rank].tolist())
            receive_counts = tuple(moved[:, rank].tolist())
            first = first_read[:, rank]
            needed = stops - first
            needed[own] = 0
            places = offsets(needed)
            # Where a chunk's first token would be, which may not have been sent.
            place, arriving = places[:-1] - (first - starts), int(places[-1])
        else:
            gathered = layout.shared
            place += owner * gathered
            arriving = layout.ranks * gathered
    place[own] = arriving + row[own]

    # Chunks by piece and token: the keys of a segment are in the chunks from its piece's first to
    # its own, from the first token that its first query sees.
    order = np.argsort(documents * (sum(layout.lengths) + 1) + starts)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    chunks_before = offsets(np.bincount(documents, minlength=len(layout.lengths)))[document]
    count = position[own] - chunks_before + 1
    runs = order[ranges(chunks_before, count)]
    skipped = np.zeros(len(runs), dtype=np.int64)
    seen_from = np.zeros(len(stop), dtype=np.int64)
    if sliding_window is not None:
        seen_from = np.maximum(starts[own] - (sliding_window - 1), 0)
        skipped = np.clip(np.repeat(seen_from, count) - starts[runs], 0, lengths[runs])
    keys = stop - seen_from
    return RankIndices(
        document=np.repeat(document, queries),
        offset=ranges(starts[own], queries),
        cu_seqlens_q=offsets(queries).astype(np.int32),
        cu_seqlens_k=offsets(keys).astype(np.int32),
        max_seqlen_q=int(queries.max(initial=0)),
        max_seqlen_k=int(keys.max(initial=0)),
        key_index=ranges(place[runs] + skipped, lengths[runs] - skipped),
        gathered=gathered,
        send_index=send_index,
        send_counts=send_counts,
        receive_counts=receive_counts,
    )


def head_indices(layout: Layout, rank: int) -> RankIndices:
    """The rows of one rank of the group where ranks split the heads; the segments are the pieces.

    Raises:
        ValueError: if the layout is not one of heads, or has no such rank.
    """
    if not layout.by_heads or not 0 <= rank < layout.ranks:
        raise ValueError(
            f"rank {rank} of {layout.ranks} ranks: head_indices is for a rank of a layout by"
            " heads, rank_indices for all others."
        )
    _, document, start, stop = layout.table.T
    own = slice(int(layout.first[rank]), int(layout.first[rank + 1]))
    queries = (stop - start)[own]
    pieces = offsets(np.array(layout.lengths, dtype=np.int64)).astype(np.int32)
    nothing = np.empty(0, dtype=np.int64)
    return RankIndices(
        document=np.repeat(document[own], queries),
        offset=ranges(start[own], queries),
        cu_seqlens_q=pieces,
        cu_seqlens_k=pieces,
        max_seqlen_q=max(layout.lengths, default=0),
        max_seqlen_k=max(layout.lengths, default=0),
        key_index=nothing,
        gathered=0,
        send_index=nothing,
        send_counts=(),
        receive_counts=(),
        head_rows=tuple(np.diff(offsets(stop - start)[layout.first]).tolist()),
    )


def _first_read(layout: Layout, sliding_window: int | None) -> Integers:
    """int64 [chunks, ranks], the first token of a chunk that a rank's other chunks read.

    Where they read none it is the chunk's end.
    """
    rank, document, start, stop = layout.table.T
    if sliding_window is None:
        # All of a chunk is read where the rank has a later one of the piece. A rank's chunks of a
        # piece ascend, and the last assignment stands.
        last = np.zeros((len(layout.lengths), layout.ranks), dtype=np.int64)
        last[document, rank] = start
        whole: Integers = np.where(last[document] > start[:, None], start[:, None], stop[:, None])
        return whole
    # The rank's next chunk of the piece, in the order of ranks, pieces and tokens.
    pieces, size = len(layout.lengths), sum(layout.lengths) + 1
    every = np.sort((rank * pieces + document) * size + start)
    every = np.append(every, layout.ranks * pieces * size)
    after = (np.arange(layout.ranks) * pieces + document[:, None]) * size + stop[:, None]
    following = every[np.searchsorted(every, after)]
    seen_from = following % size - (sliding_window - 1)
    seen_from[following // size != after // size] = size
    first: Integers = np.clip(seen_from, start[:, None], stop[:, None])
    return first


def _sent(layout: Layout, rank: int, row: Integers, first_read: Integers) -> Integers:
    """Local rows that a rank sends, by receiving rank.

    Args:
        layout: of the micro-batch.
        rank: in the group.
        row: where its chunks begin.
        first_read: of its chunks, see :func:`_first_read`.
    """
    own = slice(int(layout.first[rank]), int(layout.first[rank + 1]))
    start, stop = layout.table[own, 2:, None].transpose(1, 0, 2)
    rows = (stop - first_read).T
    rows[rank] = 0
    return ranges((row[:, None] + first_read - start).T.reshape(-1), rows.reshape(-1))
