"""The reference kernel cost: attention segments in tiles, without any device.

Tiled attention kernels (FlashAttention) take a segment's queries in tiles of 128 rows and let each
read the key/value tiles that its last query sees. A tile of queries costs a constant (loading the
queries, the first key/value tile that nothing hides, the epilogue) and one unit for each of its
key/value tiles; a segment of at most 128 rows has only one tile, whose key/value tiles have no
neighbour to share the cache with, and costs a quarter more:

    cost(segment) = sum over query tiles of (overhead + key/value tiles · (5/4 if rows <= 128)).

Costs are whole quarters of a key/value tile, so that every rank predicts alike. An overhead of 1
to 2 tiles fits the published throughput of FlashAttention-3 over short sequences; nothing here
was measured by this project. Forward and backward have the same shape in this cost, so it stands
for their sum up to a factor.

Cost: a few vectorised operations over segments. Not for nanoseconds: :mod:`.latency` has the rates
of a device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

SegmentCost = Callable[[Integers, Integers], Integers]
"""(queries, keys) of each segment -> its cost, forward and backward, in any whole unit."""

TILE = 128
"""Rows of a query tile and columns of a key/value tile."""

OVERHEAD = 2
"""Key/value tiles that a query tile costs besides those it reads."""

UNITS = 4
"""Units in one key/value tile."""


def reference_kernel_cost(
    queries: Integers,
    keys: Integers,
    overhead: int = OVERHEAD,
    sliding_window: int | None = None,
) -> Integers:
    """Cost of causal segments aligned at the bottom right.

    Args:
        queries: int64 [segments], at least 1 each.
        keys: int64 [segments], at least the queries.
        overhead: key/value tiles that each query tile costs on top.
        sliding_window: most keys that a query sees; tiles of keys that none of a tile's queries
            sees are not read.

    Returns:
        int64 [segments], in quarters of a key/value tile.
    """
    tiles = -(-queries // TILE)
    # Tile i but the last ends at query (i + 1) · TILE, the last one at the last query.
    before = -(-(keys - queries) // TILE)
    read = (tiles - 1) * before + tiles * (tiles - 1) // 2 - (-keys // TILE)
    if sliding_window is not None:
        # The first query of tile i misses whole tiles in front of its window: those in front of
        # the first query's, which may be fewer than none, and i more.
        first = (keys - queries - sliding_window + 1) // TILE
        missed = np.maximum(first, 0) * tiles + tiles * (tiles - 1) // 2
        beyond = np.maximum(tiles - 1 + first, 0)
        read = read - np.where(first >= 0, missed, beyond * (beyond + 1) // 2)
    result: Integers = UNITS * overhead * tiles + (UNITS + (queries <= TILE)) * read
    return result
