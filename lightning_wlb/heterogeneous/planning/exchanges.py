"""What each rank sends and receives between the sharded layout and the pipelines of a step.

A :class:`Redistribution` has one rank's part of every exchange. Exchanges go in *turns*: turn j
moves the j-th bucket of every rank, whichever bucket that is. So all ranks join the same
collectives in the same order, whatever stages they have, and the first buckets have arrived while
later ones are on their way. Gradients go back from the last turn to the first.

*One hop*: a rank that holds an element sends it to each rank that needs it. It then enters another
node once for every rank there that needs it. *Two hops* bring it into a node once. The ranks with
the same number in their nodes form a *rail*. In the first hop the holders on a rail send what a
node needs to that node's rank on the rail, over all network adapters at once; in the second, that
rank hands it out in its node. In between an element is on one rank of each node, in boxes cut at
every edge of what the node's ranks need, so that each box goes on whole. On two nodes of H100s a
step of a 13B model on other pipelines than the mesh's takes 7 % less with two hops than with one.

With two hops a bucket enters a node in the first turn in which one of its ranks uses it, and stays
there for ranks that use it later. On the way back that turn is the last one, so the sums leave the
node when they are complete.

Parameters are *pulled* from one of the ranks that hold them: the rank itself, else one in its node,
else any, in turn. Gradients are *pushed* the other way, to *all* ranks that hold a shard of the
parameter, or copies would drift apart; each adds up what it receives in the order of ranks. So with
one hop a rank receives exactly the elements that it needs and does not hold, and with two hops a
node receives those that one of its ranks needs and none of them holds: the fewest possible.

Cost: a few array operations for each parameter of a template and direction, over ranks and nodes;
selecting a turn takes some more over the pieces of its buckets, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_wlb.argument_checks import whole
from lightning_wlb.heterogeneous.planning.sharded_layouts import (
    Integers,
    Meetings,
    Places,
    Regions,
    Truths,
    Weights,
    cells,
    copies,
    in_step,
    meet,
    regions,
    sharded,
)
from lightning_wlb.plan import Schemes


class Pieces(NamedTuple):
    """The boxes that one rank exchanges with its peers, in the order in which they are sent.

    Attributes:
        peer: int64 [k], global rank of the other end, ascending.
        bucket: int64 [k], its number in :attr:`.Weights.buckets`.
        parameter: int64 [k], its number in the bucket.
        box: int64 [k, dimensions, 2], indices in the whole parameter.
    """

    peer: Integers
    bucket: Integers
    parameter: Integers
    box: Integers

    @property
    def elements(self) -> Integers:
        """int64 [k], number of elements of each box."""
        counts: Integers = (self.box[..., 1] - self.box[..., 0]).prod(axis=-1)
        return counts


class TurnExchange(NamedTuple):
    """One rank's part of an uneven all-to-all among ``ranks``.

    The rank sends ``out`` and receives ``into`` where parameters are exchanged; gradients go the
    other way.
    """

    ranks: range
    out: Pieces
    into: Pieces


Hop = tuple[Pieces, Pieces]
"""What a rank sends and receives of one bucket over one hop, in the direction of parameters."""


class _OfBucket(NamedTuple):
    """What one rank holds of a bucket, sharded and in the step, and its part of the exchanges.

    Attributes:
        hops: the hops of parameters, then those of gradients; none where nothing is trained.
    """

    shard: Regions
    need: Regions
    hops: tuple[Sequence[Hop], Sequence[Hop]]


@dataclass(frozen=True, eq=False)
class Redistribution:
    """One rank's exchanges between the sharded layout and the pipelines of a step.

    Args:
        weights: all parameters of the model.
        base: the pipelines of the mesh over which parameters are sharded.
        schemes: the pipelines of the step.
        rank: the global rank whose exchanges these are.
        per_node: ranks of a node.

    Raises:
        ValueError: mesh and step differ in ranks or layers, or the ranks do not fill whole nodes.
    """

    weights: Weights
    base: Schemes
    schemes: Schemes
    rank: int
    per_node: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_node", whole("per_node", self.per_node, 1))
        ranks = [sum(scheme.size for scheme in each) for each in (self.base, self.schemes)]
        if ranks[0] != ranks[1] or ranks[0] % min(self.per_node, ranks[0]):
            raise ValueError(
                f"parameters are sharded over {ranks[0]} ranks, {self.per_node} of a node, and the"
                f" pipelines of the step have {ranks[1]}. Give both all ranks of whole nodes."
            )
        for scheme in (*self.base, *self.schemes):
            if sum(scheme.stages) != self.weights.layers:
                raise ValueError(
                    f"the pipeline on {scheme} has {sum(scheme.stages)} layers, the model"
                    f" {self.weights.layers}."
                )

    @property
    def hops(self) -> int:
        """Two where there are several nodes of several ranks, else one."""
        return 1 if self._node_size == 1 else 2

    @property
    def turns(self) -> int:
        """Collectives of each hop and direction: as many as the most buckets that a rank has."""
        return int(self._turns.max()) + 1

    @property
    def buckets(self) -> list[int]:
        """Numbers of the buckets that the rank uses, by turn."""
        own = self._turns[self.rank]
        order: list[int] = own.argsort(kind="stable").tolist()
        return [bucket for bucket in order if own[bucket] >= 0]

    def boxes(self, bucket: int, *, shard: bool, trained: bool = False) -> dict[int, Integers]:
        """The box that this rank holds of each parameter of a bucket.

        Args:
            bucket: number of the bucket.
            shard: whether between steps, where parameters are sharded; else in the step.
            trained: whether to leave out parameters that get no gradients.

        Returns:
            Number of the parameter -> int64 [dimensions, 2], where the rank holds any of it.
        """
        held = self._of_bucket(bucket).shard if shard else self._of_bucket(bucket).need
        counted = self.weights.trained(self.weights.buckets[bucket])
        boxes = zip(held.parameter.tolist(), held.box, strict=True)
        return {number: box for number, box in boxes if counted[number] or not trained}

    def exchange(self, turn: int, hop: int, *, push: bool = False) -> TurnExchange:
        """The part that this rank has in one all-to-all.

        Args:
            turn: in ``range(self.turns)``.
            hop: in ``range(self.hops)``.
            push: whether of gradients, which go to every copy of a trained parameter's shard; else
                of parameters.
        """
        # On the first hop a bucket enters a node once, in the turn of the first rank that uses it.
        table, size = (self._node_turns, self._node_size) if hop == 0 else (self._turns, 1)
        chosen: tuple[list[Pieces], list[Pieces]] = [], []
        for bucket in np.flatnonzero((table == turn).any(axis=0)).tolist():
            hops = self._of_bucket(bucket).hops[push]
            if not hops:
                continue
            out, into = hops[hop]
            chosen[0].append(_some(out, bucket, table[out.peer // size, bucket] == turn))
            if table[self.rank // size, bucket] == turn:
                chosen[1].append(_some(into, bucket, slice(None)))
        return TurnExchange(self._group(hop), *(self._by_peer(each) for each in chosen))

    def _group(self, hop: int) -> range:
        ranks, size = len(self._turns), self._node_size
        if hop == 0:
            return range(self.rank % size, ranks, size)
        first = self.rank - self.rank % size
        return range(first, first + size)

    def _by_peer(self, pieces: Sequence[Pieces]) -> Pieces:
        none = np.zeros(0, np.int64)
        every = [Pieces(none, none, none, np.zeros((0, self.weights.dims, 2), np.int64)), *pieces]
        joined = [np.concatenate(field) for field in zip(*every, strict=True)]
        order = joined[0].argsort(kind="stable")  # buckets are ascending, and so they stay
        return Pieces(*(field[order] for field in joined))

    @cached_property
    def _node_size(self) -> int:
        """Ranks among which the second hop hands out what has arrived; 1 where there is one hop."""
        return self.per_node if self.per_node < len(self._turns) else 1

    @cached_property
    def _turns(self) -> Integers:
        return Places.of(self.schemes).turns([each.layers for each in self.weights.buckets])

    @cached_property
    def _node_turns(self) -> Integers:
        """When a bucket enters each node: int64 [nodes, buckets]."""
        never = np.iinfo(np.int64).max
        first = np.where(self._turns < 0, never, self._turns)
        of_nodes: Integers = first.reshape(-1, self._node_size, first.shape[1]).min(axis=1)
        return of_nodes

    @cached_property
    def _templates(self) -> list[tuple[object, ...]]:
        weights = self.weights
        return [weights.template(each, self.base, self.schemes) for each in weights.buckets]

    @cached_property
    def _made(self) -> dict[tuple[object, ...], _OfBucket]:
        return {}

    def _of_bucket(self, number: int) -> _OfBucket:
        key, bucket = self._templates[number], self.weights.buckets[number]
        if key not in self._made:
            shard = sharded(self.weights, bucket, self.base)
            need = in_step(self.weights, bucket, self.schemes)
            pull = hops_between(shard, need, self.rank, self._node_size)
            trained = np.array(self.weights.trained(bucket))
            gets, gives = (each.where(trained[each.parameter]) for each in (shard, need))
            push = (
                hops_between(gets, gives, self.rank, self._node_size, every_copy=True)
                if trained.any()
                else []
            )
            mine = shard.where(shard.rank == self.rank), need.where(need.rank == self.rank)
            self._made[key] = _OfBucket(*mine, (pull, push))
        return self._made[key]


def hops_between(
    shard: Regions, need: Regions, rank: int, per_node: int, *, every_copy: bool = False
) -> list[Hop]:
    """A rank's part of the exchange of one bucket: on its rail, then in its node.

    Args:
        shard: what all ranks hold of the bucket between steps; two boxes are equal (copies) or do
            not overlap.
        need: what all ranks need of the bucket in the step.
        rank: the rank whose part this is.
        per_node: ranks of a node; 1: there is one hop, among all ranks.
        every_copy: whether every copy of a shard takes part, as gradients need; else each node gets
            an element from one copy, as parameters do.

    Returns:
        One hop or two. What is received in the first of two is sent in the second.
    """
    node, place = divmod(rank, per_node)
    unions = need if per_node == 1 else _needs_of_nodes(need, per_node)
    mine = shard.rank == rank
    out, sources = meet(shard.where(mine), unions), shard
    if not every_copy:
        number, nodes = copies(shard), np.unique(unions.rank)
        mates = np.isin(number, number[mine])
        chosen = _sources(shard.where(mates), number[mates], nodes, per_node)
        chosen = chosen[shard.rank[mates] == rank]
        out = out.where(chosen[out.own, nodes.searchsorted(unions.rank[out.need])])
        sources = shard.where(_sources(shard, number, np.array([node]), per_node)[:, 0])
    # All that this node receives; each of its ranks receives what comes on its own rail.
    union = unions.where(unions.rank == node)
    into = meet(sources, union)
    source = sources.rank[into.own]
    brought = source % per_node == place
    first = (
        _pieces(unions.rank[out.need] * per_node + place, unions, out),
        _pieces(source[brought], union, into.where(brought)),
    )
    if per_node == 1:
        return [first]
    middle = _distinct(
        regions(node * per_node + source % per_node, union.parameter[into.need], into.box)
    )
    near = need.where(need.rank // per_node == node)
    own, wanted = middle.where(middle.rank == rank), near.where(near.rank == rank)
    out, into = meet(own, near), meet(middle, wanted)
    second = (
        _pieces(near.rank[out.need], near, out),
        _pieces(middle.rank[into.own], wanted, into),
    )
    return [first, second]


def _distinct(of: Regions) -> Regions:
    """Each box of a rank once: copies of it may come from several nodes."""
    number = of.rank * (len(of.rank) + 1) + copies(of)
    return of.where(np.sort(np.unique(number, return_index=True)[1]))


def _some(pieces: Pieces, bucket: int, chosen: Truths | slice) -> Pieces:
    """Some pieces of a template, with the number of the bucket that they stand for."""
    peer, _, parameter, box = (field[chosen] for field in pieces)
    return Pieces(peer, np.full(len(peer), bucket), parameter, box)


def _pieces(peer: Integers, need: Regions, found: Meetings) -> Pieces:
    """The pieces by peer, parameter and first index, in which any two of them differ."""
    parameter = need.parameter[found.need]
    order = np.lexsort((*found.box[..., 0].T[::-1], parameter, peer))
    return Pieces(peer[order], np.zeros_like(order), parameter[order], found.box[order])


def _sources(shard: Regions, number: Integers, nodes: Integers, per_node: int) -> Truths:
    """Which copy of a box each node gets it from: bool [boxes, nodes], true for one of each number.

    Args:
        shard: boxes that are sent.
        number: the number of each box, the same for copies.
        nodes: numbers of the nodes that receive.
        per_node: ranks of a node.
    """
    order = number.argsort(kind="stable")
    holder, number = shard.rank[order], number[order]
    near = holder[:, None] // per_node == nodes
    is_next = np.diff(number, prepend=-1) > 0
    begins, group = np.flatnonzero(is_next), is_next.cumsum() - 1
    nearest = near == np.maximum.reduceat(near, begins, axis=0)[group]
    counts = np.add.reduceat(nearest, begins, axis=0, dtype=np.int64)
    before = counts.cumsum(axis=0) - counts
    nth = nearest.cumsum(axis=0) - 1 - before[group]
    chosen = np.empty(near.shape, bool)
    chosen[order] = nearest & (nth == nodes % counts[group])
    return chosen


def _needs_of_nodes(need: Regions, per_node: int) -> Regions:
    """What the ranks of each node need together, as cells; ``rank`` then is the node's number."""
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
