"""Numba where it is installed, for searches in plain integers; without it the same code runs plain.

A search is written once, in loops over lists of integers, and the plain function is its definition:
what numba makes of it returns the same integers (the tests run both), so ranks with and without
numba agree. Values must stay below 63 bits, where numba's integers end and Python's do not.

Compiled are the subset search of balanced release, which is most of that method's time (0.7 ms
plain and 0.05 ms compiled for a step of 4 micro-batches with six long pieces), and the loops that
fill packs with slices. The other methods are spread over many small structures of which no single
loop would pay. Nothing needs numba: planning runs ahead of the step, which takes longer by orders
of magnitude.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

try:
    from numba import njit
except ImportError:
    njit = None

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` by numba, if it is installed. The machine code is kept between runs."""
    if njit is None:
        return function
    made: Callable[P, R] = njit(cache=True)(function)
    return made


def _count_below(values: Any, limit: int) -> int:
    return int(np.searchsorted(values, limit))


def _count_up_to(values: Any, limit: int) -> int:
    return int(np.searchsorted(values, limit, "right"))


count_below: Callable[[Any, int], int] = bisect_left if njit is None else compiled(_count_below)
"""Of ascending values, as :func:`integers` makes them, how many are less than a limit."""

count_up_to: Callable[[Any, int], int] = bisect_right if njit is None else compiled(_count_up_to)
"""Of ascending values, how many are at most a limit."""


def integers(values: Sequence[int]) -> Any:
    """An argument for a compiled function: an array of 64-bit integers, or a list without numba."""
    return list(values) if njit is None else np.array(values, np.int64)
