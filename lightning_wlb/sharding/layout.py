"""How the tokens of one micro-batch lie on a context-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_wlb.argument_checks import choice
from lightning_wlb.sharding.hybrid import hybrid
from lightning_wlb.sharding.integer_ranges import Integers, offsets
from lightning_wlb.sharding.methods import (
    Sharding,
    per_document,
    per_document_contiguous,
    per_sequence,
    ptrr,
)

SHARDINGS: dict[str, Sharding] = {
    "hybrid": hybrid,
    "per_document_contiguous": per_document_contiguous,
    "per_document": per_document,
    "per_sequence": per_sequence,
    "ptrr": ptrr,
}
"""The shardings by name; a new one is a function and a line here."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of one micro-batch lie on a context-parallel group."""

    lengths: tuple[int, ...]  #: tokens of each piece
    rows: int  #: rows of each rank, with padding at the end
    #: most rows that any rank holds of pieces that lie on several ranks. These rows come first on
    #: each rank, so other ranks read only among the first ``shared``
    shared: int
    #: int64 [chunks, 4], rank, piece, start and stop of each chunk, in the order of ranks and of
    #: their local rows; no chunk is empty or adjacent to its predecessor
    table: Integers
    first: Integers  #: int64 [ranks + 1], index of each rank's first chunk, then their number

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return len(self.first) - 1

    def chunks_of(self, rank: int) -> slice:
        """Where one rank's chunks are in the table."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    @cached_property
    def row(self) -> Integers:
        """int64 [chunks], the local row of each chunk's first token."""
        bounds = offsets(self.table[:, 3] - self.table[:, 2])
        return bounds[:-1] - np.repeat(bounds[self.first[:-1]], np.diff(self.first))


def layout(
    sharding: str, lengths: Sequence[int], context_parallel_size: int, tensor_parallel_size: int
) -> Layout:
    """Spread the pieces of a micro-batch over the context-parallel group.

    Args:
        sharding: a name in :data:`SHARDINGS`.
        lengths: length in tokens of each piece, each at least 1; none for an empty micro-batch.
        tensor_parallel_size: the padded rows are a multiple of it.

    Raises:
        ValueError: naming an unknown sharding and the known ones.
    """
    choice("sharding", sharding, SHARDINGS)
    sizes = np.array(lengths, dtype=np.int64).reshape(-1)
    assert sizes.min(initial=1) >= 1, "a plan has no empty pieces"
    table, first = chunks_of_each(sharding, [sizes], context_parallel_size)
    rank, document, start, stop = table.T
    # Later assignments to an element win, so these are the highest and the lowest rank.
    highest, lowest = np.zeros((2, len(sizes)), dtype=np.int64)
    highest[document] = rank
    lowest[document[::-1]] = rank[::-1]
    whole = (highest == lowest)[document]
    length = stop - start
    rows = int(np.diff(offsets(length)[first]).max())
    return Layout(
        lengths=tuple(sizes.tolist()),
        rows=-(-rows // tensor_parallel_size) * tensor_parallel_size,
        shared=int(np.diff(offsets(length * ~whole)[first]).max()),
        # Pieces on several ranks first.
        table=table[np.argsort(2 * rank + whole, kind="stable")],
        first=first,
    )


def chunks_of_each(
    sharding: str, lengths: Sequence[Integers], ranks: int
) -> tuple[Integers, Integers]:
    """The chunks of several micro-batches at once, in the order of :func:`merged`.

    Args:
        sharding: a name in :data:`SHARDINGS`.
        lengths: tokens of the pieces of each micro-batch; a single one may have none.
        ranks: ranks of each micro-batch's context-parallel group.

    Returns:
        int64 [chunks, 4], whose ranks and pieces are numbered over all micro-batches; and the index
        of the first chunk of each of these ranks, then the number of chunks.
    """
    every = np.concatenate(lengths)
    if ranks == 1 or not len(every):
        number = np.repeat(np.arange(len(lengths)), list(map(len, lengths)))
        table = np.stack((number, np.arange(len(every)), 0 * every, every), axis=1)
    else:
        table = merged(SHARDINGS[sharding](lengths, ranks), every)
    return table, np.searchsorted(table[:, 0], np.arange(ranks * len(lengths) + 1))


def merged(table: Integers, lengths: Integers) -> Integers:
    """Chunks in the order of rank, piece and token, adjacent ones joined to one segment.

    ``table`` is int64 [chunks, 4], rank, piece, start and stop of each; ``lengths`` the pieces'.
    """
    rank, document, start, _ = table.T
    token = offsets(lengths)[document] + start
    table = table[np.argsort(rank * (int(lengths.sum()) + 1) + token)]
    rank, document, start, stop = table.T
    new = np.ones(len(table), dtype=bool)
    new[1:] = (rank[1:] != rank[:-1]) | (document[1:] != document[:-1]) | (start[1:] != stop[:-1])
    kept = np.flatnonzero(new)
    joined = table[kept]
    joined[:-1, 3] = stop[kept[1:] - 1]
    joined[-1:, 3] = stop[-1:]
    return joined
