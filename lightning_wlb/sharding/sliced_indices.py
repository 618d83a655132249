"""Where the keys of a piece's earlier slices are, for the attention of its later slices.

A piece may be cut into slices that lie in several micro-batches of a replica. The queries of a
slice then see the keys of the slices before it, which stay on the ranks that computed them. For one
micro-batch and one rank of the context-parallel group this module finds them, in two steps:

1. Every rank concatenates rows: first the rows of earlier micro-batches that it holds and that a
   query of this micro-batch sees, then all of its rows of this micro-batch. They are listed as runs
   of consecutive rows (:class:`Run`).
2. These rows are gathered from all ranks, and ``key_index`` has the gathered row of each key of
   each segment. A single rank needs no such step: its runs are its segments' keys, in order.

With a sliding window a segment leaves out the keys that none of its queries sees.

Pure numpy, in the data loader. Cost: linear in the keys read: n/2 times a piece cut into n slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from lightning_wlb.plan import Slice
from lightning_wlb.sharding.integer_ranges import Integers, offsets, ranges, reach_of
from lightning_wlb.sharding.layout import Layout
from lightning_wlb.sharding.rank_indices import RankIndices, rank_indices

OWN = -1
"""Stands for the micro-batch that the indices are for."""

_NONE = np.empty(0, dtype=np.int64)

_Part = tuple[int, int]
"""A slice: the index of its micro-batch, and its own index there."""


class Run(NamedTuple):
    """Local rows ``[start, stop)`` of a micro-batch on this rank.

    ``micro_batch`` is its index in the replica's forward order, or :data:`OWN`.
    """

    micro_batch: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class SlicedIndices:
    """What one rank needs to run a micro-batch with slices of pieces that were cut."""

    #: rows and segments. ``cu_seqlens_k`` counts earlier keys too; ``key_index`` points into the
    #: gathered rows of all ranks, ``rows`` of each. A single rank does not use it
    own: RankIndices
    positions: Integers  #: int64 [n], position of each real local row from its piece's origin
    runs: tuple[Run, ...]  #: the rows that this rank concatenates
    rows: int  #: rows that each rank gives; those after its runs are padding
    keeps: bool  #: whether later slices read this micro-batch's keys


class SlicedReplica:
    """The micro-batches of one replica, in forward order, for :meth:`indices`.

    Args:
        layouts: how context ranks share each micro-batch; the lengths in it are the slices'.
        members: each micro-batch's slices, in the order of the layout.
        sliding_window: most keys that a query sees, its own included; all if None.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        members: Sequence[Sequence[Slice]],
        sliding_window: int | None = None,
    ) -> None:
        self._layouts = layouts
        self._members = members
        self._reach = reach_of(sliding_window)
        self._tokens_of: dict[int, list[Integers]] = {}
        # The slices of each piece by their first token: (start, micro-batch, index there).
        self._pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for micro_batch, slices in enumerate(members):
            for index, each in enumerate(slices):
                self._pieces[each[:2]].append((each.start, micro_batch, index))
        for parts in self._pieces.values():
            parts.sort()

    def is_sliced(self, slices: Sequence[Slice]) -> bool:
        """Whether the piece of any of the slices was cut."""
        return any(len(self._pieces[each[:2]]) > 1 for each in slices)

    def indices(self, micro_batch: int, rank: int) -> SlicedIndices:
        """Rows, segments and keys of one rank in a micro-batch."""
        layout, slices = self._layouts[micro_batch], self._members[micro_batch]
        own = rank_indices(layout, rank)
        before = [self._before(each) for each in slices]
        earlier = [part for parts in before for part in parts if part[0] != micro_batch]
        tokens = {part: self._seen(part, slices) for part in dict.fromkeys(earlier)}
        places, stride = self._places(micro_batch, tokens)
        keys = []
        for _, index, start, stop in layout.table[layout.chunks_of(rank)].tolist():
            seen = [places[part] for part in before[index]]
            seen.append(places[micro_batch, index][:stop])
            keys.append(np.concatenate(seen)[start - stop - self._reach :])
        key_index = np.concatenate([_NONE, *keys])
        held = [row[owner == rank] for owner, row in tokens.values()]
        sources = [*(part[0] for part in tokens), OWN]
        source = np.repeat(sources, [*map(len, held), layout.rows])
        row = np.concatenate([*held, np.arange(layout.rows)])
        alone = layout.ranks == 1
        contexts = np.array([each.context for each in slices], dtype=np.int64)
        return SlicedIndices(
            own=replace(
                own,
                cu_seqlens_k=offsets(np.array([*map(len, keys)], dtype=np.int64)).astype(np.int32),
                max_seqlen_k=max(map(len, keys), default=0),
                key_index=key_index,
                # All rows are gathered, unlike in micro-batches of whole pieces.
                gathered=0,
                send_index=_NONE,
                send_counts=(),
                receive_counts=(),
            ),
            positions=own.offset + contexts[own.document],
            runs=_runs(source[key_index], row[key_index]) if alone else _runs(source, row),
            rows=len(key_index) if alone else stride,
            keeps=any(self._pieces[each[:2]][-1][0] > each.start for each in slices),
        )

    def _places(
        self, micro_batch: int, tokens: Mapping[_Part, Integers]
    ) -> tuple[dict[_Part, Integers], int]:
        """The gathered rows of each slice's tokens, and the number of rows that each rank gives.

        ``tokens`` has the tokens of earlier slices; the micro-batch's own tokens are added.
        """
        owner = np.concatenate([_NONE, *(owner for owner, _ in tokens.values())])
        counts = np.bincount(owner, minlength=self._layouts[micro_batch].ranks)
        stride = int(counts.max()) + self._layouts[micro_batch].rows
        place = np.empty(len(owner), dtype=np.int64)
        for rank, count in enumerate(counts.tolist()):
            place[owner == rank] = rank * stride + np.arange(count)
        lengths = [each.shape[1] for each in tokens.values()]
        places = dict(zip(tokens, _split(place, lengths), strict=True))
        for index, (owner, row) in enumerate(self._tokens(micro_batch)):
            places[micro_batch, index] = owner * stride + counts[owner] + row
        return places, stride

    def _before(self, each: Slice) -> list[_Part]:
        """The slices of the same piece before this one, in order."""
        return [part[1:] for part in self._pieces[each[:2]] if part[0] < each.start]

    def _seen(self, part: _Part, slices: Sequence[Slice]) -> Integers:
        """The tokens of an earlier slice that a query of ``slices`` sees."""
        tokens, earlier = self._tokens(part[0])[part[1]], self._members[part[0]][part[1]]
        first = min(each.start for each in slices if each[:2] == earlier[:2])
        return tokens[:, max(first - self._reach - earlier.start, 0) :]

    def _tokens(self, micro_batch: int) -> list[Integers]:
        """Where the tokens of each slice are, int64 [2, tokens]: rank and local row."""
        if micro_batch not in self._tokens_of:
            layout = self._layouts[micro_batch]
            rank, document, start, stop = layout.table.T
            lengths = np.array(layout.lengths, dtype=np.int64)
            token = ranges(offsets(lengths)[document] + start, stop - start)
            table = np.empty((2, len(token)), dtype=np.int64)
            table[0, token] = np.repeat(rank, stop - start)
            table[1, token] = ranges(layout.row, stop - start)
            self._tokens_of[micro_batch] = _split(table, layout.lengths)
        return self._tokens_of[micro_batch]


def _split(values: Integers, lengths: Iterable[int]) -> list[Integers]:
    """Consecutive parts of an array along its last dimension, of given lengths."""
    bounds = pairwise(accumulate(lengths, initial=0))
    return [values[..., start:stop] for start, stop in bounds]


def _runs(micro_batch: Integers, row: Integers) -> tuple[Run, ...]:
    """Rows as the fewest runs, given the micro-batch and the local row of each."""
    breaks = (np.diff(micro_batch) != 0) | (np.diff(row) != 1)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(row)] if len(row) else []
    return tuple(
        Run(int(micro_batch[start]), int(row[start]), int(row[stop - 1]) + 1)
        for start, stop in pairwise(bounds)
    )
