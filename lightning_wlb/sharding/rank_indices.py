"""What one rank holds, attends to and exchanges, as arrays that kernels and collectives take.

Keys of other ranks arrive in one exchange. Rows of pieces that lie whole on one rank are never
sent. For the other pieces every rank gets either all rows (all-gather, padded to the rank with the
most rows) or just the rows that its queries see (all-to-all, with sizes that differ). Both sides of
every message are computed here from the layout, so that no rank asks another.

A rank reads nothing of another rank's chunk, or all of it. With a sliding window it may also read
only the chunk's end: the rows in the window of the rank's first query after the chunk.

Cost: vectorised, linear in keys. A sliding window adds a search for each chunk and rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_wlb.sharding.integer_ranges import Integers, offsets, ranges, reach_of
from lightning_wlb.sharding.layout import Layout

ALL_TO_ALL_PERCENT = 75
"""The all-to-all is used where its busiest rank moves at most this share of the all-gather's rows.
An all-gather runs at a higher share of a link's speed than messages of different sizes between all
pairs; how much higher was not measured by this project."""

_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RankIndices:
    """What one rank of the context-parallel group holds and attends to.

    The keys of its segments are rows of a buffer: first the rows that arrive from other ranks, then
    the rank's own local rows, padding included.
    """

    document: Integers  #: int64 [queries], the piece of each real local row, in local order
    offset: Integers  #: int64 [queries], the row's token, from the start of the piece
    #: int32 [segments + 1], first query row of each segment, then the number of rows
    cu_seqlens_q: npt.NDArray[np.int32]
    #: int32 [segments + 1], first key of each segment, then the number of keys
    cu_seqlens_k: npt.NDArray[np.int32]
    max_seqlen_q: int  #: most queries of a segment
    max_seqlen_k: int  #: most keys of a segment
    #: int64 [keys], the row of the buffer that holds each key, in the order of ``cu_seqlens_k``
    key_index: Integers
    #: how many of its first local rows every rank sends to all (all-gather); 0 if nothing is sent
    #: or an all-to-all is used
    gathered: int
    #: int64 [sum of send_counts], the local rows that an all-to-all sends, by receiving rank
    send_index: Integers
    send_counts: tuple[int, ...]  #: rows to send to each rank; empty without an all-to-all
    receive_counts: tuple[int, ...]  #: rows that arrive from each rank; empty without an all-to-all


def traffic(layout: Layout, sliding_window: int | None = None) -> Integers:
    """[sender, receiver]: the rows that an all-to-all of only the rows that are read sends."""
    return _moved(layout, _first_read(layout, sliding_window))


def _moved(layout: Layout, first_read: Integers) -> Integers:
    rows = layout.table[:, 3:] - first_read
    sums = np.zeros((len(rows) + 1, layout.ranks), dtype=np.int64)
    np.cumsum(rows, axis=0, out=sums[1:])
    moved: Integers = np.diff(sums[layout.first], axis=0)
    np.fill_diagonal(moved, 0)
    return moved


def uses_all_to_all(layout: Layout, moved: Integers) -> bool:
    """Whether keys are sent by all-to-all; ``moved`` is :func:`traffic`, the same on all ranks."""
    busiest = max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return 100 * busiest <= ALL_TO_ALL_PERCENT * (layout.ranks - 1) * layout.shared


def rank_indices(layout: Layout, rank: int, sliding_window: int | None = None) -> RankIndices:
    """The rows, attention segments, keys and messages of one rank of the group.

    A rank without chunks has no rows and no segments; a segment is never empty.

    Args:
        sliding_window: most keys a query sees, its own included (None: all); others are left out.
    """
    owner, documents, starts, stops = layout.table.T
    lengths = stops - starts
    own = layout.chunks_of(rank)
    document, stop, queries = documents[own], stops[own], lengths[own]

    gathered, arriving = 0, 0
    send_index = _NO_ROWS
    send_counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    # The row of the buffer with each chunk's first token, whether or not that token is sent.
    place = layout.row.copy()
    if layout.shared:
        first_read = _first_read(layout, sliding_window)
        moved = _moved(layout, first_read)
        if uses_all_to_all(layout, moved):
            send_index = _sent(layout, rank, first_read[own])
            send_counts = tuple(moved[rank].tolist())
            receive_counts = tuple(moved[:, rank].tolist())
            first = first_read[:, rank]
            needed = stops - first
            needed[own] = 0
            places = offsets(needed)
            place, arriving = places[:-1] - (first - starts), int(places[-1])
        else:
            gathered = layout.shared
            place += owner * gathered
            arriving = layout.ranks * gathered
    place[own] = arriving + layout.row[own]

    # Sorted by piece and token, the chunks from the piece's first to the segment's own hold the
    # segment's keys, which begin at the first token that its first query sees.
    order = np.argsort(documents * (sum(layout.lengths) + 1) + starts)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    chunks_before = offsets(np.bincount(documents, minlength=len(layout.lengths)))[document]
    count = position[own] - chunks_before + 1
    runs = order[ranges(chunks_before, count)]
    seen_from = np.maximum(starts[own] - reach_of(sliding_window), 0)
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


def _first_read(layout: Layout, sliding_window: int | None) -> Integers:
    """int64 [chunks, ranks], the first token of each chunk that a rank's later chunks read.

    If they read none of the chunk, it is the chunk's end.
    """
    rank, document, start, stop = layout.table.T
    if sliding_window is None:
        # A rank that has a later chunk of the piece reads all of a chunk. A rank's chunks of a
        # piece ascend, and later assignments win.
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


def _sent(layout: Layout, rank: int, first_read: Integers) -> Integers:
    """The local rows that a rank sends, by receiver; ``first_read`` has the rank's chunks only."""
    own = layout.chunks_of(rank)
    start, stop = layout.table[own, 2:, None].transpose(1, 0, 2)
    rows = (stop - first_read).T
    rows[rank] = 0
    first_row = layout.row[own, None] + first_read - start
    return ranges(first_row.T.reshape(-1), rows.reshape(-1))
