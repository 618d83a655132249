"""What one rank sends and receives so that a unit gets from its layout at rest to that of a step.

*One hop*: whoever holds an element sends it to each rank that needs it. Across nodes that carries
an element into a node once for every rank there that needs it. *Two hops* carry it once: the ranks
with the same number in their nodes, a *rail*, bring what a node needs from the holders on the rail
to that node's rank on it, over all network adapters at once; then that rank hands it out in its
node. Between the two an element is in one place of each node, cut at every edge of the needs there,
so that each of the pieces goes to a rank whole.

Parameters are *pulled* from one of the ranks that hold them: a rank's own copy if it has one, else
one in its node, else any, in turn. Gradients are *pushed* the other way, to *all* ranks that hold
the parameter at rest, or copies would drift apart; each adds up what comes in the order of ranks.

So the elements that a rank receives over one hop are those that it needs and does not hold, and
those that enter a node over two hops are those that some rank in it needs and none in it holds:
no exchange of them can do with fewer.

Boxes at rest are either equal (copies) or do not overlap.

Cost: a few array operations for each parameter and direction, over ranks, and over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_wlb.heterogeneous.planning.sharded_layouts import Integers, Regions, Truths, regions


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


class Pieces(NamedTuple):
    """What goes between one rank and its peers, sorted by peer; both ends have the same order.

    Attributes:
        peer: int64 [k], global rank of the other end.
        parameter: int64 [k], its number in the unit.
        box: int64 [k, dimensions, 2], indices in the whole parameter.
    """

    peer: Integers
    parameter: Integers
    box: Integers


class Hop(NamedTuple):
    """One exchange, in the direction of parameters; gradients go from ``into`` to ``out``."""

    out: Pieces
    into: Pieces


def one_hop(
    rest: Regions, need: Regions, rank: int, per_node: int, *, every_copy: bool = False
) -> list[Hop]:
    """A rank's part of one exchange among all ranks.

    Args:
        rest: of the unit, all ranks.
        need: of the unit, all ranks.
        rank: whose part it is.
        per_node: ranks of a node.
        every_copy: whether each copy at rest takes part, for gradients; else each rank has its
            element from one of them, for parameters.

    Returns:
        The hop, alone.
    """
    mine = rest.rank == rank
    wanted = need.where(need.rank == rank)
    out, sources = meet(rest.where(mine), need), rest
    if not every_copy:
        number, ranks = copies(rest), np.unique(need.rank)
        mates = np.isin(number, number[mine])
        chosen = _sources(rest.where(mates), number[mates], ranks // per_node, per_node, ranks)
        chosen = chosen[rest.rank[mates] == rank]
        out = out.where(chosen[out.own, ranks.searchsorted(need.rank[out.need])])
        me = np.array([rank])
        sources = rest.where(_sources(rest, number, me // per_node, per_node, me)[:, 0])
    into = meet(sources, wanted)
    return [
        Hop(_pieces(need.rank[out.need], need, out), _pieces(sources.rank[into.own], wanted, into))
    ]


def two_hops(
    rest: Regions, need: Regions, rank: int, per_node: int, *, every_copy: bool = False
) -> list[Hop]:
    """A rank's part of an exchange on its rail, then in its node; arguments as of one hop.

    Returns:
        The outer hop and the inner one. What comes in by the outer one goes out by the inner one.
    """
    node, place = divmod(rank, per_node)
    unions = _needs_of_nodes(need, per_node)
    mine = rest.rank == rank
    out, sources = meet(rest.where(mine), unions), rest
    if not every_copy:
        number, nodes = copies(rest), np.unique(unions.rank)
        mates = np.isin(number, number[mine])
        chosen = _sources(rest.where(mates), number[mates], nodes, per_node)
        chosen = chosen[rest.rank[mates] == rank]
        out = out.where(chosen[out.own, nodes.searchsorted(unions.rank[out.need])])
        sources = rest.where(_sources(rest, number, np.array([node]), per_node)[:, 0])
    # All that comes into this node; each of its ranks brings what is on its own rail.
    union = unions.where(unions.rank == node)
    into = meet(sources, union)
    source = sources.rank[into.own]
    brought = source % per_node == place
    outer = Hop(
        _pieces(unions.rank[out.need] * per_node + place, unions, out),
        _pieces(source[brought], union, into.where(brought)),
    )
    middle = _distinct(
        regions(node * per_node + source % per_node, union.parameter[into.need], into.box)
    )
    near = need.where(need.rank // per_node == node)
    own, wanted = middle.where(middle.rank == rank), near.where(near.rank == rank)
    out, into = meet(own, near), meet(middle, wanted)
    inner = Hop(
        _pieces(near.rank[out.need], near, out), _pieces(middle.rank[into.own], wanted, into)
    )
    return [outer, inner]


def _pieces(peer: Integers, need: Regions, found: Meetings) -> Pieces:
    """In the order of peer, parameter and place, which no two pieces have alike."""
    parameter = need.parameter[found.need]
    order = np.lexsort((*found.box[..., 0].T[::-1], parameter, peer))
    return Pieces(peer[order], parameter[order], found.box[order])


def _distinct(of: Regions) -> Regions:
    """Each box of a rank once: copies of it may come from several nodes."""
    _, first = np.unique(copies(of, by_rank=True), return_index=True)
    return of.where(np.sort(first))


def _sources(
    rest: Regions, number: Integers, nodes: Integers, per_node: int, ranks: Integers | None = None
) -> Truths:
    """From which copy each taker has a box: bool [boxes, takers], one of each number.

    Args:
        rest: where boxes rest.
        number: of each box, the same for copies.
        nodes: of the takers.
        per_node: ranks of a node.
        ranks: of the takers; None if they are whole nodes.
    """
    order = number.argsort(kind="stable")
    holder, number = rest.rank[order], number[order]
    near = (holder[:, None] // per_node == nodes).astype(np.int8)
    if ranks is not None:
        near += holder[:, None] == ranks
    is_next = np.diff(number, prepend=-1) > 0
    begins, group = np.flatnonzero(is_next), is_next.cumsum() - 1
    nearest = near == np.maximum.reduceat(near, begins, axis=0)[group]
    counts = np.add.reduceat(nearest, begins, axis=0, dtype=np.int64)
    before = counts.cumsum(axis=0) - counts
    nth = nearest.cumsum(axis=0) - 1 - before[group]
    turn = nodes if ranks is None else ranks
    chosen = np.empty(near.shape, bool)
    chosen[order] = nearest & (nth == turn % counts[group])
    return chosen


def _needs_of_nodes(need: Regions, per_node: int) -> Regions:
    """What the ranks of each node need together, as cells; ``rank`` is the number of the node."""
    node = need.rank // per_node
    order = np.lexsort((need.rank, need.parameter, node))
    node, parameter, box = node[order], need.parameter[order], need.box[order]
    ends = node.searchsorted(np.arange(node.max(initial=-1) + 2))
    made: dict[bytes, tuple[Integers, Integers]] = {}  # nodes of like pipelines need the same
    found: list[tuple[Integers, Integers, Integers]] = []
    for number, (first, stop) in enumerate(pairwise(ends)):
        key = parameter[first:stop].tobytes() + box[first:stop].tobytes()
        if key not in made:
            made[key] = _cells_of(parameter[first:stop], box[first:stop])
        parameters, cut = made[key]
        found.append((np.full(len(cut), number), parameters, cut))
    return regions(*map(np.concatenate, zip(*found, strict=True)))


def _cells_of(parameter: Integers, box: Integers) -> tuple[Integers, Integers]:
    """The cells of boxes of several parameters, and the parameter of each."""
    numbers: Sequence[int] = np.unique(parameter).tolist()
    cut = [cells(np.unique(box[parameter == number], axis=0)) for number in numbers]
    counts = [len(each) for each in cut]
    return np.repeat(numbers, counts).astype(np.int64), np.concatenate([box[:0], *cut])
