"""What each rank sends and receives between the sharded layout and the pipelines of a step.

A :class:`Redistribution` has one rank's part of every exchange. Exchanges run in *turns*: turn j
moves the j-th bucket of every rank, whichever bucket that is. So all ranks join the same
collectives in the same order, whatever stages they have, and the first buckets arrive while later
ones are still being sent. Gradients are sent from the last turn to the first.

A rank *pulls* each part of a parameter from one rank that holds it: itself if it does, else one of
the others by turns. Gradients are *pushed* the other way, to *all* ranks that hold the shard, else
copies would drift apart; each adds up what it receives in the order of ranks. So a rank receives
exactly the elements that it needs and does not hold.

Cost: once a few array operations over ranks for each parameter; some hundred bytes a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from lightning_wlb.heterogeneous.planning.sharded_layouts import (
    Integers,
    Places,
    Truths,
    Weights,
    in_step,
    sharded,
)
from lightning_wlb.plan import Schemes


class ExchangedPiece(NamedTuple):
    """A box of a parameter that a rank sends to a peer or receives from it."""

    peer: int  #: global rank of the other end
    name: str  #: of the parameter in the whole model
    #: the box in this rank's own tensor: its shard, or its part of the stage in the step
    place: tuple[slice, ...]
    elements: int  #: how many it has


class TurnExchange(NamedTuple):
    """One rank's part of an all-to-all of all ranks: what it sends and receives, by peer."""

    out: list[ExchangedPiece]
    into: list[ExchangedPiece]


@dataclass(frozen=True, eq=False)
class Redistribution:
    """One rank's exchanges between the sharded layout and the pipelines of a step.

    Raises:
        ValueError: mesh and step differ in ranks or layers.
    """

    weights: Weights
    base: Schemes  #: the pipelines of the mesh over which parameters are sharded
    schemes: Schemes
    rank: int

    def __post_init__(self) -> None:
        ranks = [sum(scheme.size for scheme in each) for each in (self.base, self.schemes)]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"parameters are sharded over {ranks[0]} ranks, and the pipelines of the step have"
                f" {ranks[1]}. Give both all ranks."
            )
        for scheme in (*self.base, *self.schemes):
            if sum(scheme.stages) != self.weights.layers:
                raise ValueError(
                    f"the pipeline on {scheme} has {sum(scheme.stages)} layers, the model"
                    f" {self.weights.layers}."
                )

    @property
    def turns(self) -> int:
        """Collectives of each direction: as many as the most buckets that a rank has."""
        return int(self._turns.max()) + 1

    @property
    def buckets(self) -> list[int]:
        """Numbers of the buckets that the rank uses, by turn."""
        own = self._turns[self.rank]
        order: list[int] = own.argsort(kind="stable").tolist()
        return [bucket for bucket in order if own[bucket] >= 0]

    def shapes(self, turn: int) -> dict[str, tuple[int, ...]]:
        """The shape in the step, by name, of each parameter that the rank gets in a turn."""
        return self._shapes[turn] if turn < len(self._shapes) else {}

    def exchange(self, turn: int, *, push: bool = False) -> TurnExchange:
        """The rank's part of one all-to-all of parameters, or with ``push`` of gradients."""
        return self._exchanges[push][turn]

    @cached_property
    def _turns(self) -> Integers:
        return Places.of(self.schemes).turns([each.layers for each in self.weights.buckets])

    @cached_property
    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        buckets = (self.weights.buckets[number] for number in self.buckets)
        needs = (in_step(self.weights, bucket, self.schemes) for bucket in buckets)
        return [
            {name: tuple(np.diff(box[self.rank])[:, 0].tolist()) for name, box in each.items()}
            for each in needs
        ]

    @cached_property
    def _exchanges(self) -> tuple[list[TurnExchange], list[TurnExchange]]:
        """The exchanges of each turn: those that pull parameters, and those that push gradients."""
        pulls, pushes = ([TurnExchange([], []) for _ in range(self.turns)] for _ in range(2))
        for number, bucket in enumerate(self.weights.buckets):
            shards = sharded(self.weights, bucket, self.base)
            needs = in_step(self.weights, bucket, self.schemes)
            turn_of = self._turns[:, number].tolist()
            for name, shard in shards.items():
                need, trained = needs[name], name not in self.weights.frozen
                to, source = _sources(shard, self.rank)
                for each in _pieces(name, shard[self.rank], need):
                    if to[each.peer]:
                        pulls[turn_of[each.peer]].out.append(each)
                    if trained:
                        pushes[turn_of[each.peer]].into.append(each)
                for each in _pieces(name, need[self.rank], shard):
                    if source[each.peer]:
                        pulls[turn_of[self.rank]].into.append(each)
                    if trained:
                        pushes[turn_of[self.rank]].out.append(each)
        for exchange in (*pulls, *pushes):
            for pieces in exchange:  # a stable sort: each peer's pieces keep their bucket's order
                pieces.sort(key=lambda each: each.peer)
        return pulls, pushes


def _pieces(name: str, own: Integers, others: Integers) -> list[ExchangedPiece]:
    """The parts of a rank's box of a parameter that lie in the box of each rank."""
    start = np.maximum(own[:, 0], others[..., 0])
    stop = np.minimum(own[:, 1], others[..., 1])
    (peers,) = np.nonzero((start < stop).all(axis=1))
    ends = zip(*((each[peers] - own[:, 0]).tolist() for each in (start, stop)), strict=True)
    made = []
    for peer, (starts, stops) in zip(peers.tolist(), ends, strict=True):
        place = tuple(map(slice, starts, stops))
        made.append(ExchangedPiece(peer, name, place, prod(s.stop - s.start for s in place)))
    return made


def _sources(shard: Integers, rank: int) -> tuple[Truths, Truths]:
    """Ranks that take this rank's shard of a parameter, and ranks that it takes shards from.

    Both are bool [ranks]. If several ranks have equal shards, a rank takes its own if it has one,
    else one of theirs, chosen by the number of the taking rank.
    """
    ranks = np.arange(len(shard))
    filled = (shard[..., 0] < shard[..., 1]).all(axis=1)
    # Two boxes that are not empty are equal or do not overlap, so they differ where they begin.
    begins = np.ravel_multi_index(tuple(shard[..., 0].T), tuple(shard[..., 1].max(axis=0) + 1))
    _, copy = np.unique(np.where(filled, begins, -1 - ranks), return_inverse=True)
    order, counts = copy.argsort(kind="stable"), np.bincount(copy)
    first = counts.cumsum() - counts
    taken = order[first + rank % counts]
    taken[copy[rank]] = rank
    holders = np.flatnonzero(copy == copy[rank])
    giver = holders[ranks % len(holders)]
    giver[holders] = holders
    return giver == rank, taken[copy] == ranks
