"""Tables of achieved FLOP/s in a device profile, and interpolation between their points.

Between the points of a table the *inverse* rate is interpolated linearly over 1/queries, 1/(keys
per query) and 1/rows, which is exact for a time of the form a + b·queries·keys. Only additions,
subtractions, multiplications and divisions are used, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_wlb.argument_checks import whole, wholes

MOST_TILE = 1 << 20
"""Most queries of a tile, and width of a head."""

Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AttentionTable:
    """Achieved FLOP/s of the attention kernel for one head size (WLB-LLM §5.3).

    FLOPs are those of :func:`lightning_wlb.cost.flops.causal_pairs` with the queries rounded up to
    the tile; backward counts 2.5 times the forward's.
    """

    head_dim: int  #: width of one head
    tile: int  #: the kernel rounds a segment's queries up to a multiple of this; 1: it does not
    queries: tuple[int, ...]  #: queries of a segment, ascending
    keys_per_query: tuple[float, ...]  #: keys of a segment over its queries, ascending from 1
    forward: tuple[tuple[float, ...], ...]  #: FLOP/s of the forward pass, [queries][keys_per_query]
    #: FLOP/s of the backward pass, [queries][keys_per_query]
    backward: tuple[tuple[float, ...], ...]
    #: time of a kernel call besides its segments, (forward, backward)
    call_ns: tuple[float, float] = (0.0, 0.0)
    #: tiles of one head that the device works on at the same time, (forward, backward); 1 if a call
    #: takes the sum of its segments' times, however few they are
    at_once: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        _check_axis("attention.queries", self.queries)
        wholes("device profile: attention.at_once", self.at_once, 1)
        _check_axis("attention.keys_per_query", self.keys_per_query)
        for size in ("tile", "head_dim"):
            if whole(f"device profile: attention.{size}", getattr(self, size), 1) > MOST_TILE:
                raise ValueError(f"device profile: attention.{size} is above {MOST_TILE}.")
        for name, table in (("forward", self.forward), ("backward", self.backward)):
            shape = [len(row) for row in table]
            if shape != [len(self.keys_per_query)] * len(self.queries):
                raise ValueError(
                    f"device profile: attention.{name} has rows of {shape} entries, but the axes"
                    f" ask for {len(self.queries)} rows of {len(self.keys_per_query)}."
                )
            for row in table:
                check_positive(f"attention.{name}", row)

    def inverse_rates(self, queries: Integers, keys: Integers) -> _Floats:
        """Seconds per FLOP of segments, float64 [2 (forward, backward), segments].

        Beyond the table its nearest values count. ``queries`` and ``keys`` are int64 [segments].
        """
        inverse = _inverse(self.forward, self.backward)
        row, row_weight = _cell(queries.astype(np.float64), self.queries)
        column, column_weight = _cell(keys / queries, self.keys_per_query)
        next_row = np.minimum(row + 1, inverse.shape[1] - 1)
        next_column = np.minimum(column + 1, inverse.shape[2] - 1)
        low, high = (
            inverse[:, at, column] * column_weight
            + inverse[:, at, next_column] * (1.0 - column_weight)
            for at in (row, next_row)
        )
        return low * row_weight + high * (1.0 - row_weight)


@dataclass(frozen=True)
class LinearTable:
    """Achieved FLOP/s of matrix products by rows: a short micro-batch has a lower utilisation."""

    #: ascending; a call on fewer rows than the first takes as long as on the first
    rows: tuple[int, ...]
    forward: tuple[float, ...]  #: FLOP/s of the forward pass at each number of rows
    backward: tuple[float, ...]  #: FLOP/s of the backward pass, of twice the FLOPs

    def __post_init__(self) -> None:
        _check_axis("rows", self.rows)
        for name, values in (("forward", self.forward), ("backward", self.backward)):
            if len(values) != len(self.rows):
                raise ValueError(
                    f"device profile: {name} has {len(values)} rates, rows has {len(self.rows)}."
                )
            check_positive(name, values)

    def seconds(self, flops: int, rows: int, *, backward: bool) -> float:
        """Time of ``flops`` FLOPs of matrix products on ``rows`` rows."""
        if rows == 0 or flops == 0:
            return 0.0
        axis, rates = self.rows, self.backward if backward else self.forward
        if rows < axis[0]:
            return flops / rows * axis[0] / rates[0]
        if rows >= axis[-1]:
            return flops * (1.0 / rates[-1])
        index = bisect_right(axis, rows) - 1
        low, high = 1.0 / axis[index], 1.0 / axis[index + 1]
        weight = (1.0 / rows - high) / (low - high)
        return flops * (weight / rates[index] + (1.0 - weight) / rates[index + 1])


def _check_axis(name: str, values: Sequence[float]) -> None:
    rising = all(low < high for low, high in pairwise(values))
    if not values or not rising or values[0] < 1:
        raise ValueError(
            f"device profile: {name}={values} must rise strictly from at least 1, and hold a point."
        )


def check_positive(name: str, values: Sequence[float]) -> None:
    """Refuse values of a profile's field that are 0 or less, or infinite."""
    if not all(0 < value < float("inf") for value in values):
        raise ValueError(f"device profile: {name}={values} must be above 0, and finite.")


def _cell(values: _Floats, axis: tuple[float, ...]) -> tuple[Integers, _Floats]:
    """The axis point at or below each value, and its weight by 1/value (0 at the next point)."""
    points, inverse = _points(axis)
    values = np.minimum(np.maximum(values, axis[0]), axis[-1])
    # The last point belongs to the cell before it.
    index = np.searchsorted(points[1:-1], values, side="right")
    if len(points) == 1:
        return index, np.ones(len(values))
    low, high = inverse[index], inverse[index + 1]
    return index, (1.0 / values - high) / (low - high)


@lru_cache(maxsize=64)
def _inverse(*tables: tuple[tuple[float, ...], ...]) -> _Floats:
    """1/rate of tables with equal axes, float64 [tables, ...]."""
    return 1.0 / np.array(tables, dtype=np.float64)


@lru_cache(maxsize=64)
def _points(axis: tuple[float, ...]) -> tuple[_Floats, _Floats]:
    points = np.array(axis, dtype=np.float64)
    return points, 1.0 / points
