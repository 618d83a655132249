"""The link between the layout at rest and a step's strategy: every exchange of one rank, by slot.

Units travel in *slots*: slot j has the j-th unit of every rank, whichever that is. So all ranks
join the same collectives in the same order, whatever stages they have and whatever they lack, and
the first units are there while later ones travel. Gradients go back from the last slot to the
first.

Over two hops a unit enters a node in the first slot in which one of its ranks uses it, and is kept
there for those which use it later. On the way back the same slot is the last one, so that the sums
leave the node when they are complete.

Where a step has the strategy of the mesh there is nothing to link: parameters are gathered as in
any other step.

Cost: the index arithmetic of :mod:`.hops` once for each template and direction; selecting a slot
takes some array operations over the pieces of the units in it, when it is asked for. A pair of
layouts is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_wlb.arguments import whole
from lightning_wlb.heterogeneous.planning.hops import Hop, Pieces, one_hop, two_hops
from lightning_wlb.heterogeneous.planning.sharded_layouts import (
    Integers,
    Regions,
    Weights,
    at_rest,
    in_step,
    slots,
)
from lightning_wlb.plan import Schemes


class Parts(NamedTuple):
    """What goes between one rank and its peers in a slot, in the order in which it travels.

    Attributes:
        peer: int64 [k], global rank of the other end, ascending.
        unit: int64 [k], its number in :attr:`.Weights.units`.
        parameter: int64 [k], its number in the unit.
        box: int64 [k, dimensions, 2], indices in the whole parameter.
    """

    peer: Integers
    unit: Integers
    parameter: Integers
    box: Integers

    @property
    def elements(self) -> Integers:
        """int64 [k]."""
        counts: Integers = (self.box[..., 1] - self.box[..., 0]).prod(axis=-1)
        return counts


class Exchange(NamedTuple):
    """One rank's part of an uneven all-to-all; gradients go from ``into`` to ``out``.

    Attributes:
        ranks: who take part, ascending.
        out: sent, of parameters.
        into: received, of parameters.
    """

    ranks: range
    out: Parts
    into: Parts


@dataclass(frozen=True, eq=False)
class Link:
    """One rank's exchanges between rest and a strategy.

    Args:
        weights: of the model.
        base: the strategy of the mesh on which parameters rest.
        strategy: of the step.
        rank: whose exchanges they are.
        per_node: ranks of a node.

    Raises:
        ValueError: the two are for other numbers of ranks or layers than each other, or for nodes
            that are not whole.
    """

    weights: Weights
    base: Schemes
    strategy: Schemes
    rank: int
    per_node: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_node", whole("per_node", self.per_node, 1))
        ranks = [sum(scheme.size for scheme in each) for each in (self.base, self.strategy)]
        if ranks[0] != ranks[1] or ranks[0] % min(self.per_node, ranks[0]):
            raise ValueError(
                f"parameters rest on {ranks[0]} ranks, {self.per_node} of a node, and the strategy"
                f" has {ranks[1]}. Give both all ranks of whole nodes."
            )
        for scheme in (*self.base, *self.strategy):
            if sum(scheme.stages) != self.weights.layers:
                raise ValueError(
                    f"the pipeline on {scheme} has {sum(scheme.stages)} layers, the model"
                    f" {self.weights.layers}."
                )

    @property
    def hops(self) -> int:
        """Two where there are several nodes of several ranks, else one."""
        return 2 if 1 < self.per_node < len(self._slots) else 1

    @property
    def slots(self) -> int:
        """Collectives of each hop and direction: the most units that a rank has."""
        return int(self._slots.max()) + 1

    @property
    def units(self) -> list[int]:
        """Numbers of the units that the rank uses, in the order of slots."""
        own = self._slots[self.rank]
        order: list[int] = own.argsort(kind="stable").tolist()
        return [unit for unit in order if own[unit] >= 0]

    def boxes(self, unit: int, *, rest: bool, trained: bool = False) -> dict[int, Integers]:
        """What this rank holds of a unit, at rest or in the step.

        Args:
            unit: its number.
            rest: at rest; else in the step.
            trained: whether only of parameters that get gradients.

        Returns:
            Number of the parameter -> int64 [dimensions, 2]; without those of which it has nothing.
        """
        of_unit = self._of_unit(unit).rest if rest else self._of_unit(unit).need
        counted = self.weights.trained(self.weights.units[unit])
        boxes = zip(of_unit.parameter.tolist(), of_unit.box, strict=True)
        return {number: box for number, box in boxes if counted[number] or not trained}

    def exchange(self, slot: int, hop: int, *, push: bool = False) -> Exchange:
        """One all-to-all.

        Args:
            slot: in ``range(self.slots)``.
            hop: in ``range(self.hops)``.
            push: of gradients, which go to every copy of a parameter that gets some; else of
                parameters.
        """
        outer = self.hops == 2 and hop == 0
        # Over the outer hop a node takes a unit once, whichever of its ranks does so first.
        table, takers = (self._of_nodes, self.per_node) if outer else (self._slots, 1)
        units = np.flatnonzero((table == slot).any(axis=0)).tolist()
        out, into = [], []
        for unit in units:
            hops = self._of_unit(unit).hops[push]
            if not hops:
                continue
            of_unit = hops[hop]
            now = table[of_unit.out.peer // takers, unit] == slot
            out.append((unit, of_unit.out, np.flatnonzero(now)))
            if table[self.rank // takers, unit] == slot:
                into.append((unit, of_unit.into, np.arange(len(of_unit.into.peer))))
        dims = self.weights.dims
        return Exchange(self._group(hop), _parts(out, dims), _parts(into, dims))

    def _group(self, hop: int) -> range:
        ranks, size = len(self._slots), self.per_node
        if self.hops == 1:
            return range(ranks)
        if hop == 0:
            return range(self.rank % size, ranks, size)
        first = self.rank // size * size
        return range(first, first + size)

    @cached_property
    def _slots(self) -> Integers:
        return slots(self.weights, self.strategy)

    @cached_property
    def _of_nodes(self) -> Integers:
        """When a unit enters each node: int64 [nodes, units]."""
        never = np.iinfo(np.int64).max
        first = np.where(self._slots < 0, never, self._slots)
        of_nodes: Integers = first.reshape(-1, self.per_node, first.shape[1]).min(axis=1)
        return of_nodes

    @cached_property
    def _templates(self) -> list[tuple[object, ...]]:
        weights = self.weights
        return [weights.template(unit, self.base, self.strategy) for unit in weights.units]

    @cached_property
    def _made(self) -> dict[tuple[object, ...], _OfUnit]:
        return {}

    def _of_unit(self, unit: int) -> _OfUnit:
        key = self._templates[unit]
        if key not in self._made:
            rest = at_rest(self.weights, self.weights.units[unit], self.base)
            need = in_step(self.weights, self.weights.units[unit], self.strategy)
            how = two_hops if self.hops == 2 else one_hop
            size = min(self.per_node, len(self._slots))
            pull = how(rest, need, self.rank, size)
            trained = np.array(self.weights.trained(self.weights.units[unit]))
            gets, gives = (each.where(trained[each.parameter]) for each in (rest, need))
            push = how(gets, gives, self.rank, size, every_copy=True) if trained.any() else []
            mine = rest.where(rest.rank == self.rank), need.where(need.rank == self.rank)
            self._made[key] = _OfUnit(*mine, (pull, push))
        return self._made[key]


class _OfUnit(NamedTuple):
    """What one rank has of a unit, and its hops: of parameters, and of gradients, if it has any."""

    rest: Regions
    need: Regions
    hops: tuple[list[Hop], list[Hop]]


def _parts(of_units: Sequence[tuple[int, Pieces, Integers]], dims: int) -> Parts:
    """Pieces of some units, by peer."""
    none = np.zeros(0, np.int64)
    unit = np.concatenate([none, *(np.full(len(at), each) for each, _, at in of_units)])
    peer, parameter = (
        np.concatenate([none, *(pieces[field][at] for _, pieces, at in of_units)])
        for field in (0, 1)
    )
    box = np.concatenate(
        [np.zeros((0, dims, 2), np.int64), *(pieces.box[at] for _, pieces, at in of_units)]
    )
    order = peer.argsort(kind="stable")  # units are ascending, and so they stay
    return Parts(peer[order], unit[order], parameter[order], box[order])


class Links:
    """One rank's links to the strategies of a run, each worked out once.

    Args:
        weights: of the model.
        base: the strategy of the mesh on which parameters rest.
        rank: this rank.
        per_node: ranks of a node.
    """

    def __init__(self, weights: Weights, base: Schemes, rank: int, per_node: int) -> None:
        self._fixed = weights, base, rank, per_node
        self._made: dict[Schemes, Link] = {}

    def to(self, strategy: Schemes) -> Link | None:
        """The link to a strategy; None where it is that of the mesh.

        Raises:
            ValueError: as of :class:`.Link`.
        """
        weights, base, rank, per_node = self._fixed
        if strategy == base:
            return None
        if strategy not in self._made:
            self._made[strategy] = Link(weights, base, strategy, rank, per_node)
        return self._made[strategy]
