"""Which rank holds which part of each parameter: at rest, and in a step of some strategy.

At rest (*optimisation layout*) parameters and optimizer state are where the run's mesh has them:
the stages of a pipeline on its ranks, weights split over the tensor axis, and each rank's part over
data × context as FSDP2 splits it. Tensor-parallel ranks hold what is not split, a norm, all alike,
and a tied weight rests on both ends.

In a step (*propagation layout*) a rank of a pipeline holds its stage whole, or its tensor-parallel
part of it.

Parameters travel in *units*: a layer, an end, or the weight that both ends share. Layers that are
alike and lie on the same stages, at rest and in every pipeline, have the same layout up to the
names: a *template* (:meth:`.Weights.template`). A model has a few of them, however many layers.

Cost: O(ranks) array elements for each parameter of a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.distributed.sharded_dim import sharded_dim
from lightning_wlb.plan import Schemes

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


class Unit(NamedTuple):
    """Parameters that travel together.

    Attributes:
        names: of the parameters in the whole model.
        layers: the unit is on the stages that have these layers.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """The parameters of a whole model, as plain numbers.

    Args:
        shapes: of each parameter by name, in the order of first use; a tied one under one name.
        split: tensor-parallel size -> parameter -> the dimension that is split; those that are not
            named are whole on every rank. Size 1 needs no entry.
        tied: names of the parameters that embedding and head share.
        frozen: names of those that get no gradients.

    Raises:
        ValueError: a parameter in none of embed, layers and head, of which each pipeline stage
            would train a copy, or layers without numbers from 0 on.
    """

    shapes: Mapping[str, tuple[int, ...]]
    split: Mapping[int, Mapping[str, int]]
    tied: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.shapes:
            if name.split(".")[0] not in ("embed", "layers", "head"):
                raise ValueError(
                    f"{name} is in none of embed, layers and head, so pipelines that differ cannot"
                    " share it. Move it into one of them, or use dynamic='off'."
                )
        found = sorted(self._of_layers)
        if found != list(range(len(found))) or not found:
            raise ValueError(f"layers {found} are not numbered from 0 on.")

    @cached_property
    def _of_layers(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in self.shapes:
            if name.startswith("layers."):
                found.setdefault(int(name.split(".")[1]), []).append(name)
        return found

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._of_layers)

    @cached_property
    def dims(self) -> int:
        """Dimensions of a box: the most that a parameter has."""
        return max(map(len, self.shapes.values()))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Embedding, what is tied, layers, head; none is empty."""
        last = self.layers - 1
        ends = {
            end: tuple(n for n in self.shapes if n.startswith(end) and n not in self.tied)
            for end in ("embed.", "head.")
        }
        every = [
            Unit(ends["embed."], (0,)),
            Unit(tuple(name for name in self.shapes if name in self.tied), (0, last)),
            *(Unit(tuple(names), (n,)) for n, names in sorted(self._of_layers.items())),
            Unit(ends["head."], (last,)),
        ]
        return tuple(unit for unit in every if unit.names)

    def template(self, unit: Unit, base: Schemes, strategy: Schemes) -> tuple[object, ...]:
        """Equal for units that rest and travel alike."""
        stages = [_Places.of(each).stages_of(unit.layers) for each in (base, strategy)]
        sizes = sorted({scheme.tensor for scheme in (*base[:1], *strategy)})
        dims = tuple(self.split_dim(name, size) for name in unit.names for size in sizes)
        return tuple(self.shapes[name] for name in unit.names), dims, self.trained(unit), *stages

    def trained(self, unit: Unit) -> tuple[bool, ...]:
        """Of each parameter of a unit whether it gets gradients."""
        return tuple(name not in self.frozen for name in unit.names)

    def split_dim(self, name: str, size: int) -> int | None:
        """The dimension that so many tensor-parallel ranks split; None: they hold it alike.

        Raises:
            ValueError: nothing is known of this size.
        """
        if size == 1:
            return None
        if size not in self.split:
            raise ValueError(f"how tensor={size} ranks split the weights is not given.")
        return self.split[size].get(name)


def at_rest(weights: Weights, unit: Unit, base: Schemes) -> Regions:
    """Where a unit rests on the run's mesh.

    Raises:
        ValueError: pipelines that differ, or a weight that its ranks cannot split.
    """
    if len({scheme.shape for scheme in base}) > 1:
        raise ValueError(
            "Parameters rest on pipelines that are all alike, but there are"
            f" {'; '.join(map(str, base))}. Give the strategy of a mesh."
        )
    found = _held(weights, unit, base)
    places = _Places.of(base)
    ranks = len(base) * base[0].context
    number = (places.pipeline * base[0].context + places.context)[found.rank]
    box = found.box
    for parameter, name in enumerate(unit.names):
        own = np.flatnonzero(found.parameter == parameter)
        part = (box[own[0], :, 1] - box[own[0], :, 0]).tolist()[: len(weights.shapes[name])]
        dim = sharded_dim(part, ranks)
        start, stop = box[own, dim].T
        rows = -(-(stop - start) // ranks)
        box[own, dim, 0] = np.minimum(start + number[own] * rows, stop)
        box[own, dim, 1] = np.minimum(start + (number[own] + 1) * rows, stop)
    return regions(found.rank, found.parameter, box)


def in_step(weights: Weights, unit: Unit, strategy: Schemes) -> Regions:
    """Which part of a unit each rank computes with.

    Raises:
        ValueError: a weight that the ranks of a pipeline cannot split.
    """
    return _held(weights, unit, strategy)


def _held(weights: Weights, unit: Unit, strategy: Schemes) -> Regions:
    """Each rank's part by stage and tensor place."""
    places = _Places.of(strategy)
    rank = np.flatnonzero(places.holds(unit.layers))
    size, place = places.size[rank], places.tensor[rank]
    found = []
    for name in unit.names:
        shape = weights.shapes[name]
        whole = [(0, length) for length in shape] + [(0, 1)] * (weights.dims - len(shape))
        box = np.tile(np.array(whole, np.int64), (len(rank), 1, 1))
        for tensor in np.unique(size).tolist():
            dim = weights.split_dim(name, tensor)
            if dim is None:
                continue
            if shape[dim] % tensor:
                raise ValueError(
                    f"dimension {dim} of {name}, of shape {shape}, does not divide by"
                    f" tensor={tensor}. Choose a size that divides it."
                )
            rows, own = shape[dim] // tensor, size == tensor
            box[own, dim, 0] = place[own] * rows
            box[own, dim, 1] = (place[own] + 1) * rows
        found.append(box)
    parameter = np.repeat(np.arange(len(unit.names)), len(rank))
    return regions(np.tile(rank, len(unit.names)), parameter, np.concatenate(found))


@dataclass(frozen=True, eq=False)
class _Places:
    """Where each rank of a strategy stands: arrays by global rank."""

    pipeline: Integers
    stage: Integers
    context: Integers
    tensor: Integers
    size: Integers  # tensor-parallel ranks
    kind: Integers  # of its scheme: which of those that are not alike
    layers: tuple[tuple[range, ...], ...]  # of each kind, on each stage

    @staticmethod
    @lru_cache(maxsize=64)
    def of(strategy: Schemes) -> _Places:
        """The places of a strategy."""
        numbers: dict[object, int] = {}
        kinds = [numbers.setdefault(each.shape, len(numbers)) for each in strategy]
        pipeline = np.repeat(np.arange(len(strategy)), [each.size for each in strategy])
        context, size, first, kind = (
            np.array(values)[pipeline]
            for values in zip(
                *((s.context, s.tensor, s.first, k) for s, k in zip(strategy, kinds, strict=True)),
                strict=True,
            )
        )
        rest, tensor = np.divmod(np.arange(len(pipeline)) - first, size)
        stage, place = np.divmod(rest, context)
        layers = tuple(strategy[kinds.index(number)].layers for number in range(len(numbers)))
        return _Places(pipeline, stage, place, tensor, size, kind, layers)

    def stages_of(self, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of each kind of scheme the stages that have the layers."""
        return tuple(
            tuple(stage for stage, own in enumerate(each) if any(layer in own for layer in layers))
            for each in self.layers
        )

    def holds(self, layers: Sequence[int]) -> Truths:
        """Whether each rank's stage has one of the layers."""
        held = np.zeros(len(self.stage), bool)
        for kind, stages in enumerate(self.stages_of(layers)):
            held |= (self.kind == kind) & np.isin(self.stage, stages)
        return held


def slots(weights: Weights, strategy: Schemes) -> Integers:
    """When each rank uses each unit first: int64 [ranks, units], -1 where it does not.

    A rank's units count from 0 on. What is tied comes before the last layer where a stage has no
    embedding.
    """
    places = _Places.of(strategy)
    table = np.full((len(places.stage), len(weights.units)), -1, np.int64)
    for kind, stages in enumerate(places.layers):
        for stage, own in enumerate(stages):
            here = [
                (unit.layers[-1 if stage else 0], number)
                for number, unit in enumerate(weights.units)
                if any(layer in own for layer in unit.layers)
            ]
            rows = np.flatnonzero((places.kind == kind) & (places.stage == stage))
            table[rows[:, None], [number for _, number in sorted(here)]] = np.arange(len(here))
    return table
