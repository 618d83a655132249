"""Who holds which index range of which parameter, as arrays, and where such ranges meet.

A *box* is a range of indices in every dimension of a parameter, int64 [dimensions, 2] of start and
stop. :class:`.Regions` are boxes with a rank each. All parameters of a unit are in one, so that a
unit of some thousand ranks takes a few array operations for each parameter, and no Python loop over
ranks; parameters of fewer dimensions than others have ranges [0, 1) behind their own.

Cost: :func:`meet` is O(n·m) array elements for each parameter; so callers restrict one side to one
rank, or to one node, first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]


class Regions(NamedTuple):
    """Boxes, sorted by parameter; none is empty, and those of a rank do not overlap.

    Attributes:
        rank: int64 [k], who holds each box.
        parameter: int64 [k], its number in the unit.
        box: int64 [k, dimensions, 2].
    """

    rank: Integers
    parameter: Integers
    box: Integers

    def where(self, chosen: Truths | Integers) -> Regions:
        """Some of the boxes, in the order in which they are here."""
        return Regions(self.rank[chosen], self.parameter[chosen], self.box[chosen])


def regions(rank: Integers, parameter: Integers, box: Integers) -> Regions:
    """The regions of boxes in any order, of which empty ones are left out."""
    filled = (box[..., 0] < box[..., 1]).all(axis=-1)
    order = np.flatnonzero(filled)
    order = order[parameter[order].argsort(kind="stable")]
    return Regions(rank[order], parameter[order], box[order])


class Meetings(NamedTuple):
    """Where boxes of two regions overlap.

    Attributes:
        own: int64 [k], index of the first one's box.
        need: int64 [k], index of the second one's.
        box: int64 [k, dimensions, 2], what they have in common.
    """

    own: Integers
    need: Integers
    box: Integers

    def where(self, chosen: Truths | Integers) -> Meetings:
        """Some of them, in the order in which they are here."""
        return Meetings(self.own[chosen], self.need[chosen], self.box[chosen])


def meet(own: Regions, need: Regions) -> Meetings:
    """Every pair of overlapping boxes of a parameter."""
    found = []
    most = 1 + max(own.parameter.max(initial=-1), need.parameter.max(initial=-1))
    own_ends = own.parameter.searchsorted(np.arange(most + 1))
    need_ends = need.parameter.searchsorted(np.arange(most + 1))
    for (a, b), (c, d) in zip(pairwise(own_ends), pairwise(need_ends), strict=True):
        starts = np.maximum(own.box[a:b, None, :, 0], need.box[None, c:d, :, 0])
        stops = np.minimum(own.box[a:b, None, :, 1], need.box[None, c:d, :, 1])
        first, second = np.nonzero((starts < stops).all(axis=-1))
        box = np.stack([starts[first, second], stops[first, second]], axis=-1)
        found.append((first + a, second + c, box))
    if not found:
        none = np.zeros(0, np.int64)
        return Meetings(none, none, need.box[:0])
    return Meetings(*map(np.concatenate, zip(*found, strict=True)))


def cells(boxes: Integers) -> Integers:
    """Boxes without overlap that cover what the given ones cover, cut at every edge of these.

    So each given box is a union of cells.

    Args:
        boxes: int64 [k, dimensions, 2], of one parameter.

    Returns:
        int64 [cells, dimensions, 2], in ascending order.
    """
    ranges = []
    for dim in range(boxes.shape[1]):
        edges = np.unique(boxes[:, dim])
        ranges.append(np.stack([edges[:-1], edges[1:]], axis=-1))
    numbers = np.indices([len(each) for each in ranges]).reshape(len(ranges), -1)
    grid = np.stack([each[of] for each, of in zip(ranges, numbers, strict=True)], axis=1)
    inside = (boxes[None, :, :, 0] <= grid[:, None, :, 0]) & (
        grid[:, None, :, 1] <= boxes[None, :, :, 1]
    )
    covered: Integers = grid[inside.all(axis=-1).any(axis=-1)]
    return covered


def copies(of: Regions, *, by_rank: bool = False) -> Integers:
    """A number for each box, the same for those that are equal, or equal and of one rank.

    Returns:
        int64 [k].
    """
    keys = [*of.box.reshape(len(of.box), 2 * of.box.shape[1]).T, of.parameter]
    if by_rank:
        keys.append(of.rank)
    order = np.lexsort(keys)
    begins = np.zeros(len(order), bool)
    for key in keys:
        begins |= np.diff(key[order], prepend=-1) != 0
    numbers = np.empty(len(order), np.int64)
    numbers[order] = begins.cumsum()
    return numbers
