"""Rates between the points of a device profile's tables.

The *inverse* rate is interpolated, linearly over 1/queries, 1/(keys per query) and 1/rows, see
:mod:`~lightning_wlb.cost.profile`; beyond a table it stays what it is at the table's end. Only the
four operations of arithmetic are used, so that results are the same on every processor.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_wlb.cost.profile import AttentionTable

Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def inverse_rates(table: AttentionTable, queries: Integers, keys: Integers) -> _Floats:
    """Seconds per FLOP of segments, bilinear over 1/queries and 1/(keys per query).

    Beyond the table's last queries or keys the rate stays what it is there.

    Returns:
        float64 [2, segments]: of forward and of backward.
    """
    inverse = _inverse(table.forward, table.backward)
    row, row_weight = _cell(queries.astype(np.float64), table.queries)
    column, column_weight = _cell(keys / queries, table.keys_per_query)
    next_row = np.minimum(row + 1, inverse.shape[1] - 1)
    next_column = np.minimum(column + 1, inverse.shape[2] - 1)
    low, high = (
        inverse[:, at, column] * column_weight + inverse[:, at, next_column] * (1.0 - column_weight)
        for at in (row, next_row)
    )
    result: _Floats = low * row_weight + high * (1.0 - row_weight)
    return result


def _cell(values: _Floats, axis: tuple[float, ...]) -> tuple[Integers, _Floats]:
    """The axis point at or below each value, and its weight by 1/value; 0 weight at the next."""
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
    """1/rate of tables of equal axes."""
    inverse: _Floats = 1.0 / np.array(tables, dtype=np.float64)
    return inverse


@lru_cache(maxsize=64)
def _points(axis: tuple[float, ...]) -> tuple[_Floats, _Floats]:
    """An axis and its inverse."""
    points = np.array(axis, dtype=np.float64)
    return points, 1.0 / points


def inverse_rate_of_rows(value: int, axis: tuple[int, ...], rates: tuple[float, ...]) -> float:
    """1/rate at ``value``, linear over 1/value between the points of the axis."""
    if value >= axis[-1]:
        return 1.0 / rates[-1]
    index = next(number for number in range(len(axis) - 1) if value < axis[number + 1])
    low, high = 1.0 / axis[index], 1.0 / axis[index + 1]
    weight = (1.0 / value - high) / (low - high)
    return weight / rates[index] + (1.0 - weight) / rates[index + 1]
