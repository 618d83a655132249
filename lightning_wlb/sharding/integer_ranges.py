"""Operations on many ranges of integers at once, for the index arithmetic of shardings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

UNBOUNDED = 2**62
"""More keys than any query sees."""


def reach_of(sliding_window: int | None) -> int:
    """Most keys that a query sees besides its own."""
    return UNBOUNDED if sliding_window is None else sliding_window - 1


def offsets(lengths: Integers) -> Integers:
    """The begin of each of several concatenated ranges, then the end of the last one."""
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def ranges(start: Integers, length: Integers) -> Integers:
    """``[start, start + length)`` of each row, concatenated."""
    ends = offsets(length)
    result = np.repeat(start - ends[:-1], length)
    result += np.arange(ends[-1], dtype=np.int64)
    return result


def cut(lengths: Integers, cuts: Integers) -> Integers:
    """Cut concatenated pieces into intervals.

    Args:
        lengths: tokens of each piece.
        cuts: where the intervals begin, ascending from 0, in tokens of all pieces together.

    Returns:
        int64 [parts, 4]: interval, piece, first token and end of each part of a piece that lies in
        one interval, in the order of tokens. Tokens are counted from the piece's start.
    """
    first = offsets(lengths)
    # This has a fraction of numpy.unique's overhead.
    every = np.sort(np.concatenate((first, cuts)))
    bounds = every[np.append(True, every[1:] != every[:-1])]
    start, stop = bounds[:-1], bounds[1:]
    piece = np.searchsorted(first, start, side="right") - 1
    interval = np.searchsorted(cuts, start, side="right") - 1
    return np.stack((interval, piece, start - first[piece], stop - first[piece]), axis=1)
