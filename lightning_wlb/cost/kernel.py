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


def reference_kernel_cost(queries: Integers, keys: Integers, overhead: int = OVERHEAD) -> Integers:
    """Cost of causal segments aligned at the bottom right (docs/design.md, section 6).

    Args:
        queries: int64 [segments], at least 1 each.
        keys: int64 [segments], at least the queries.
        overhead: key/value tiles that each query tile costs on top.

    Returns:
        int64 [segments], in quarters of a key/value tile.
    """
    tiles = -(-queries // TILE)
    # Tile i but the last ends at query (i + 1) · TILE, the last one at the last query.
    before = -(-(keys - queries) // TILE)
    read = (tiles - 1) * before + tiles * (tiles - 1) // 2 - (-keys // TILE)
    result: Integers = UNITS * overhead * tiles + (UNITS + (queries <= TILE)) * read
    return result
