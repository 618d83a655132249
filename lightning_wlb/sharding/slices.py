"""Index arithmetic of slices: where the keys of a piece's earlier micro-batches are.

A piece may span several micro-batches of a replica. A slice's queries then attend to the keys of
the slices before it, which their micro-batches left behind on the ranks that computed them. For
one micro-batch and one context-parallel rank this module says which rows the rank puts one after
another, as runs of consecutive rows (:class:`Run`):

* on a single rank the keys of its segments, in their order: nothing else is needed;
* in a group the rows of earlier keys that any rank reads, then its own rows. Every rank's are
  gathered, and an index says which of these rows each key of each segment is.

With a sliding window the keys that no query of a segment sees are left out, and so are earlier rows
that no query of the micro-batch sees.

Pure numpy, in the data loader. Cost: linear in the keys read, which for a piece cut into n slices
is n/2 times the piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_wlb.plan import Slice
from lightning_wlb.sharding import Layout, RankIndices, rank_indices

Indices = npt.NDArray[np.int64]

Part = tuple[int, int]
"""A slice by the micro-batch that it is in, and its index there."""


OWN = -1
"""In place of a micro-batch: the one that the indices are of."""


class Run(NamedTuple):
    """Local rows ``[start, stop)`` of a micro-batch on this rank.

    ``micro_batch`` is its index in the replica's forward order, or :data:`OWN`.
    """

    micro_batch: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class SlicedIndices:
    """What one rank needs to run a micro-batch whose slices have earlier or later ones.

    Args:
        own: rows and segments. ``cu_seqlens_k`` counts earlier keys too, and ``key_index`` points
            into the ``rows`` that each rank puts together, one rank's after another's; not used
            on a single rank, whose runs are in order.
        positions: int64 [n], position of each real local row from its piece's origin.
        runs: what the rank puts one after another.
        rows: of it, the same on all ranks; rows beyond a rank's runs are read by none.
        keeps: whether other slices read this one's keys.
    """

    own: RankIndices
    positions: Indices
    runs: tuple[Run, ...]
    rows: int
    keeps: bool


@dataclass(frozen=True, eq=False)
class _Places:
    """Rank and local row of every token of a micro-batch, slice after slice."""

    owner: Indices
    row: Indices
    first: Indices

    def of(self, index: int) -> tuple[Indices, Indices]:
        part = slice(self.first[index], self.first[index + 1])
        return self.owner[part], self.row[part]


class SlicedReplica:
    """The micro-batches of one replica, in forward order, for :meth:`indices`.

    Args:
        layouts: each micro-batch's layout over the context-parallel ranks; its lengths are the
            tokens of the slices.
        members: each micro-batch's slices, in the order of the layout.
        sliding_window: most keys that a query sees, its own included; None: no bound.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        members: Sequence[Sequence[Slice]],
        sliding_window: int | None = None,
    ) -> None:
        self._layouts = layouts
        self._sliding_window = sliding_window
        self._members = members
        self._places: dict[int, _Places] = {}
        # Where the slices of each piece are, by start.
        self._pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for micro_batch, slices in enumerate(members):
            for index, part in enumerate(slices):
                key = (part.document, part.origin)
                self._pieces[key].append((part.start, micro_batch, index))
        for parts in self._pieces.values():
            parts.sort()

    def is_sliced(self, slices: Sequence[Slice]) -> bool:
        """Whether one of the slices has earlier or later ones."""
        return any(len(self._pieces[part.document, part.origin]) > 1 for part in slices)

    def indices(self, micro_batch: int, rank: int) -> SlicedIndices:
        """Rows, segments and keys of one rank in a micro-batch."""
        layout, places = self._layouts[micro_batch], self._at(micro_batch)
        slices = self._members[micro_batch]
        own = rank_indices(layout, rank)
        gathered = _Gathered(layout.ranks)
        # Keys that a query sees besides its own, and the first query of each piece.
        reach = None if self._sliding_window is None else self._sliding_window - 1
        first_query: dict[tuple[int, int], int] = {}
        for each in slices:
            piece = each.document, each.origin
            first_query[piece] = min(each.start, first_query.get(piece, each.start))

        def place(part: Part) -> _Tokens:
            if part[0] == micro_batch:
                return _Tokens(*places.of(part[1]), past=False)
            earlier = self._members[part[0]][part[1]]
            owner, row = self._at(part[0]).of(part[1])
            skipped = 0
            if reach is not None:
                seen_from = first_query[earlier.document, earlier.origin] - reach
                skipped = min(max(seen_from - earlier.start, 0), earlier.tokens)
            return gathered.add(part, owner[skipped:], row[skipped:])

        contexts = [[place(part) for part in self._before(each)] for each in slices]
        counts = np.array(gathered.counts)
        stride = int(counts.max()) + layout.rows
        own_places = _Tokens(places.owner, places.row, past=False).resolve(stride, counts)
        first = places.first
        keys: list[Indices] = []
        for chunk in layout.chunks[rank]:
            start = first[chunk.document]
            of_chunk = [place.resolve(stride, counts) for place in contexts[chunk.document]]
            of_chunk.append(own_places[start : start + chunk.stop])
            seen = np.concatenate(of_chunk)
            if reach is not None:
                seen = seen[-(chunk.stop - chunk.start + reach) :]
            keys.append(seen)
        lengths = list(map(len, keys))
        key_index = np.concatenate([np.empty(0, np.int64), *keys])
        put_together = [(source, rows[rank]) for source, rows in gathered.sources]
        put_together.append((OWN, np.arange(layout.rows)))
        alone = layout.ranks == 1
        cu_seqlens_k = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        origins = np.array([part.context for part in slices], dtype=np.int64)
        return SlicedIndices(
            own=replace(
                own,
                cu_seqlens_k=cu_seqlens_k.astype(np.int32),
                max_seqlen_k=max(lengths, default=0),
                key_index=key_index,
                # All rows are gathered, whatever whole pieces would send.
                gathered=0,
                send_index=np.empty(0, np.int64),
                send_counts=(),
                receive_counts=(),
            ),
            positions=own.offset + (origins[own.document] if len(own.document) else 0),
            runs=_runs(put_together, key_index if alone else None),
            rows=len(key_index) if alone else stride,
            keeps=any(
                self._pieces[part.document, part.origin][-1][0] > part.start for part in slices
            ),
        )

    def _before(self, part: Slice) -> list[Part]:
        """The slices of the piece that come before ``part``."""
        parts = self._pieces[part.document, part.origin]
        return [(other, index) for start, other, index in parts if start < part.start]

    def _at(self, micro_batch: int) -> _Places:
        if micro_batch not in self._places:
            self._places[micro_batch] = _places(self._layouts[micro_batch])
        return self._places[micro_batch]


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens by rank and row: among the past rows that are gathered, or among the own rows."""

    owner: Indices
    row: Indices
    past: bool

    def resolve(self, stride: int, counts: Indices) -> Indices:
        """Places among what all ranks put together, ``stride`` rows each, past rows first."""
        return self.owner * stride + self.row + (0 if self.past else counts[self.owner])


class _Gathered:
    """The earlier rows that each rank contributes, as they are put together."""

    def __init__(self, ranks: int) -> None:
        self.counts = [0] * ranks
        self.sources: list[tuple[int, list[Indices]]] = []
        self._known: dict[Part, _Tokens] = {}

    def add(self, part: Part, owner: Indices, row: Indices) -> _Tokens:
        known = self._known.get(part)
        if known is not None:
            return known
        at = np.empty(len(owner), dtype=np.int64)
        rows = []
        for rank, count in enumerate(self.counts):
            mine = np.flatnonzero(owner == rank)
            at[mine] = count + np.arange(len(mine))
            self.counts[rank] += len(mine)
            rows.append(row[mine])
        self.sources.append((part[0], rows))
        known = self._known[part] = _Tokens(owner, at, past=True)
        return known


def _runs(parts: Sequence[tuple[int, Indices]], order: Indices | None) -> tuple[Run, ...]:
    """Rows of several micro-batches, one after another or taken in ``order``, as runs."""
    source = np.repeat([micro_batch for micro_batch, _ in parts], [len(rows) for _, rows in parts])
    row = np.concatenate([rows for _, rows in parts])
    if order is not None:
        source, row = source[order], row[order]
    breaks = np.flatnonzero((np.diff(source) != 0) | (np.diff(row) != 1)) + 1
    bounds = [0, *breaks.tolist(), len(row)] if len(row) else []
    return tuple(
        Run(int(source[start]), int(row[start]), int(row[stop - 1]) + 1)
        for start, stop in pairwise(bounds)
    )


def _places(layout: Layout) -> _Places:
    first = np.concatenate(([0], np.cumsum(layout.lengths, dtype=np.int64)))
    owner = np.empty(first[-1], dtype=np.int64)
    row = np.empty(first[-1], dtype=np.int64)
    for rank, chunks in enumerate(layout.chunks):
        at = 0
        for chunk in chunks:
            tokens = slice(first[chunk.document] + chunk.start, first[chunk.document] + chunk.stop)
            count = chunk.stop - chunk.start
            owner[tokens] = rank
            row[tokens] = np.arange(at, at + count)
            at += count
    return _Places(owner, row, first)
