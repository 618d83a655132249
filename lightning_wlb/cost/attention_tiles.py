"""The reference kernel cost: attention segments in tiles, without any device.

Tiled attention kernels (FlashAttention) take a segment's queries in tiles of 128 rows, and each
query tile reads the key/value tiles that its last query sees. A query tile costs a constant
(loading the queries, the first key/value tile, whose loading nothing hides, and the epilogue) and
one unit for each key/value tile it reads. The single query tile of a segment of at most 128 rows
shares no key/value tiles in the cache, so they cost a quarter more:

    cost(segment) = sum over query tiles of (overhead + key/value tiles · (5/4 if rows <= 128)).

Costs are whole quarters of a key/value tile, so that every rank predicts the same. The overhead is
fitted to the published throughput of FlashAttention-3 over short sequences; this project did not
measure it. Forward and backward have the same shape in this cost, so it stands for their sum up to
a factor. It is not a time: :mod:`~lightning_wlb.cost.latency` has the rates of a device, and
:func:`last_tiles_end` models the end of a call, when fewer tiles than processors are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

SegmentCost = Callable[[Integers, Integers], Integers]
"""(queries, keys) of each segment -> its cost, forward and backward, in any whole unit."""

TILE = 128
"""Rows of a query tile and columns of a key/value tile."""

OVERHEAD = 2
"""Cost of a query tile besides the key/value tiles that it reads, in such tiles; see above."""

UNITS = 4
"""Units of cost in one key/value tile."""


def reference_kernel_cost(
    queries: Integers, keys: Integers, overhead: int = OVERHEAD, sliding_window: int | None = None
) -> Integers:
    """Cost of causal segments aligned at the bottom right, int64 [segments].

    It is in quarters of a key/value tile.

    Args:
        queries: int64 [segments], at least 1 each.
        keys: int64 [segments], at least the queries.
        overhead: cost of a query tile besides the key/value tiles that it reads, in such tiles.
        sliding_window: most keys that a query sees; tiles that none sees are not read.
    """
    tiles = -(-queries // TILE)
    # Query tile i ends at query (i + 1) · TILE, the last tile at the last query.
    before = -(-(keys - queries) // TILE)
    read = (tiles - 1) * before + tiles * (tiles - 1) // 2 - (-keys // TILE)
    if sliding_window is not None:
        # The window of tile i's first query leaves out i more whole tiles at the front than the
        # window of tile 0's first query. `first` is the latter's number, negative if none.
        first = (keys - queries - sliding_window + 1) // TILE
        missed = np.maximum(first, 0) * tiles + tiles * (tiles - 1) // 2
        beyond = np.maximum(tiles - 1 + first, 0)
        read = read - np.where(first >= 0, missed, beyond * (beyond + 1) // 2)
    result: Integers = UNITS * overhead * tiles + (UNITS + (queries <= TILE)) * read
    return result


def layers_kernel_cost(
    queries: Integers, keys: Integers, windows: Mapping[int | None, int]
) -> Integers:
    """The sum of :func:`reference_kernel_cost` over layers whose windows differ, int64 [segments].

    Args:
        queries: int64 [segments], as ``keys``.
        windows: weight of the layers of each window, such as ``PassWork.windows``; None is no
            bound. Weights are divided by their greatest common divisor.
    """
    each = gcd(*windows.values()) or 1
    costs = (
        weight // each * reference_kernel_cost(queries, keys, sliding_window=window)
        for window, weight in windows.items()
    )
    return sum(costs, np.zeros_like(queries))


def padded_pairs(
    queries: Integers, keys: Integers, tile: int, sliding_window: int | None
) -> tuple[Integers, Integers, Integers]:
    """(query, key) pairs of segments whose queries a kernel pads to its tile.

    Padding rows see no keys after the last query's. The other arguments are those of
    :func:`reference_kernel_cost`. Returns int64 [segments]: pairs, padded queries, their keys.
    """
    tiles = -(-queries // tile)
    padded = tiles * tile
    # The last tile reads fewer keys than a full one; the difference is spread over all tiles.
    before = np.maximum(keys - queries - (padded - queries) // tiles, 0)
    pairs = _pairs(padded + before) - _pairs(before)
    if sliding_window is not None:
        pairs += _pairs(np.maximum(before - sliding_window, 0))
        pairs -= _pairs(np.maximum(padded + before - sliding_window, 0))
        before = np.minimum(before, sliding_window)
    return pairs, padded, padded + before


def _pairs(tokens: Integers) -> Integers:
    """(query, key) pairs of whole pieces."""
    return tokens * (tokens + 1) // 2


def last_tiles_end(
    busy: Integers, tiles: Integers, longest: Integers, at_once: Integers
) -> Integers:
    """When a device that works on ``at_once`` tiles at a time has ended a call.

    A forward deals tiles of queries of each head to the processors, a backward tiles of keys. A
    call takes at least as long as its longest tile. Otherwise the processors wait at the end for
    half of the difference between the longest and the mean tile.

    Args:
        busy: how long the call would take if all processors were busy to its end.
        tiles: tiles of all heads; 0 in an empty call.
        longest: how long the longest tile takes on its processor, in the unit of ``busy``.
        at_once: tiles that run at the same time.
    """
    mean = busy * at_once // np.maximum(tiles, 1)
    result: Integers = np.maximum(longest, busy + np.maximum(longest - mean, 0) // 2)
    return result
