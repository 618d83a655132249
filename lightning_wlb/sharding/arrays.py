"""Ranges of integers, many at once: what every part of the index arithmetic is made of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def offsets(lengths: Integers) -> Integers:
    """Where each of several concatenated ranges begins, then where the last one ends."""
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def ranges(start: Integers, length: Integers) -> Integers:
    """``[start, start + length)`` of each row, concatenated."""
    ends = offsets(length)
    result = np.repeat(start - ends[:-1], length)
    result += np.arange(ends[-1], dtype=np.int64)
    return result


def distinct(*values: Integers) -> Integers:
    """All values in ascending order, each once (a fraction of ``numpy.unique``'s overhead)."""
    every = np.sort(np.concatenate(values))
    new = np.ones(len(every), dtype=bool)
    np.not_equal(every[1:], every[:-1], out=new[1:])
    return every[new]
