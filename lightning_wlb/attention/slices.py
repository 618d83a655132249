"""Index arithmetic of slices: where the keys of a piece's earlier micro-batches are.

A piece may span several micro-batches of a replica. A slice's queries then attend to the keys of
the slices before it, which their micro-batches left behind on the ranks that computed them. For
one micro-batch and one context-parallel rank this module says

* which local rows of which earlier micro-batches the rank contributes (:class:`PastRows`), and
* which row of the gathered keys each key of each segment is. What is gathered is, from every
  rank, its ``past_rows`` rows of earlier keys (padded to the same number on all ranks) followed by
  its own rows of this micro-batch.

Pure numpy, in the data loader. Cost: linear in the keys read, which for a piece cut into n slices
is n/2 times the piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_wlb.attention.sharding import Layout, RankIndices, rank_indices
from lightning_wlb.plan import Slice

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PastRows:
    """Local rows of an earlier micro-batch whose keys this rank contributes.

    Args:
        micro_batch: index of the earlier micro-batch in the replica's forward order.
        rows: int64 [n], its local rows on this rank, in the order of the piece's tokens.
    """

    micro_batch: int
    rows: Indices


@dataclass(frozen=True, eq=False)
class SlicedIndices:
    """What one rank needs to run a micro-batch whose slices have earlier or later ones.

    Args:
        own: rows and segments. ``cu_seqlens_k`` counts earlier keys too, and ``key_index`` points
            into the gathered [ranks · (past_rows + rows)] keys, also with one rank.
        positions: int64 [n], position of each real local row from its piece's origin.
        past: rows of earlier micro-batches, in the order in which they are put together.
        past_rows: rows of earlier keys that every rank contributes, padding included.
        keeps: whether a later micro-batch reads this one's keys.
    """

    own: RankIndices
    positions: Indices
    past: tuple[PastRows, ...]
    past_rows: int
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
    """

    def __init__(self, layouts: Sequence[Layout], members: Sequence[Sequence[Slice]]) -> None:
        self._layouts = layouts
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

    def is_sliced(self, micro_batch: int) -> bool:
        """Whether a slice of the micro-batch has earlier or later slices."""
        return any(
            len(self._pieces[part.document, part.origin]) > 1 for part in self._members[micro_batch]
        )

    def indices(self, micro_batch: int, rank: int) -> SlicedIndices:
        """Rows, segments and keys of one rank."""
        layout = self._layouts[micro_batch]
        slices = self._members[micro_batch]
        own = rank_indices(layout, rank)
        gathered = _Gathered(len(layout.chunks))
        contexts = [
            [self._place(gathered, micro_batch, other, index) for other, index in before]
            for before in (self._before(part) for part in slices)
        ]
        stride = gathered.past_rows + layout.rows
        owner, row = self._at(micro_batch).owner, self._at(micro_batch).row
        own_places = owner * stride + gathered.past_rows + row
        first = self._at(micro_batch).first
        key_index: list[Indices] = []
        lengths = []
        for chunk in layout.chunks[rank]:
            start = first[chunk.document]
            keys = [place.resolve(stride, gathered.past_rows) for place in contexts[chunk.document]]
            keys.append(own_places[start : start + chunk.stop])
            key_index += keys
            lengths.append(sum(map(len, keys)))
        cu_seqlens_k = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        origins = np.array([part.context for part in slices], dtype=np.int64)
        return SlicedIndices(
            own=replace(
                own,
                cu_seqlens_k=cu_seqlens_k.astype(np.int32),
                max_seqlen_k=max(lengths, default=0),
                key_index=np.concatenate([np.empty(0, np.int64), *key_index]),
            ),
            positions=own.offset + (origins[own.document] if len(own.document) else 0),
            past=tuple(
                PastRows(source, rows[rank]) for source, rows in gathered.sources if len(rows[rank])
            ),
            past_rows=gathered.past_rows,
            keeps=any(
                self._pieces[part.document, part.origin][-1][0] > part.start for part in slices
            ),
        )

    def _before(self, part: Slice) -> list[tuple[int, int]]:
        """(micro-batch, index) of the slices of the piece that come before ``part``."""
        parts = self._pieces[part.document, part.origin]
        return [(other, index) for start, other, index in parts if start < part.start]

    def _at(self, micro_batch: int) -> _Places:
        if micro_batch not in self._places:
            self._places[micro_batch] = _places(self._layouts[micro_batch])
        return self._places[micro_batch]

    def _place(self, gathered: _Gathered, here: int, other: int, index: int) -> _Tokens:
        owner, row = self._at(other).of(index)
        if other == here:
            return _Tokens(owner, row, past=False)
        return gathered.add(other, index, owner, row)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens by rank and row: among the past rows that are gathered, or among the own rows."""

    owner: Indices
    row: Indices
    past: bool

    def resolve(self, stride: int, past_rows: int) -> Indices:
        return self.owner * stride + self.row + (0 if self.past else past_rows)


class _Gathered:
    """The earlier rows that each rank contributes, as they are put together."""

    def __init__(self, ranks: int) -> None:
        self.counts = [0] * ranks
        self.sources: list[tuple[int, list[Indices]]] = []
        self._known: dict[tuple[int, int], _Tokens] = {}

    @property
    def past_rows(self) -> int:
        return max(self.counts)

    def add(self, micro_batch: int, index: int, owner: Indices, row: Indices) -> _Tokens:
        known = self._known.get((micro_batch, index))
        if known is not None:
            return known
        at = np.empty(len(owner), dtype=np.int64)
        rows = []
        for rank, count in enumerate(self.counts):
            mine = np.flatnonzero(owner == rank)
            at[mine] = count + np.arange(len(mine))
            self.counts[rank] += len(mine)
            rows.append(row[mine])
        self.sources.append((micro_batch, rows))
        known = self._known[micro_batch, index] = _Tokens(owner, at, past=True)
        return known


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
