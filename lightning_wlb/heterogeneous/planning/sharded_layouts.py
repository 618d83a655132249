"""Which rank holds which part of each parameter: sharded between steps, and whole in a step.

*Sharded*: between steps the run's mesh holds parameters and optimizer state. Each pipeline rank has
its stages, weights are split over the tensor axis, and FSDP2 shards each rank's part over data ×
context. What is not split, such as a norm, is the same on all tensor-parallel ranks, and a tied
weight is on both ends.

*In a step* a rank of a pipeline holds its stage whole, or its tensor-parallel part of it.

Parameters move in *buckets*: a layer, an end, or the weight that both ends share. Layers that are
alike and lie on the same stages, sharded and in every pipeline, have the same layout up to their
names. They share one *template* (:meth:`.Weights.template`); a model has a few templates, however
many layers.

A *box* is a range of indices in every dimension of a parameter, int64 [dimensions, 2] of start and
stop. Parameters with fewer dimensions than others get ranges [0, 1) at the end. All boxes of a
bucket stand in arrays (:class:`Regions`), without a Python loop over ranks.

Cost: O(ranks) array elements for each parameter of a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.mesh import sharded_dim
from lightning_wlb.plan import Schemes

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]


class Regions(NamedTuple):
    """Boxes, sorted by parameter; none is empty, and those of a rank do not overlap.

    Attributes:
        rank: int64 [k], the rank that holds each box.
        parameter: int64 [k], its number in the bucket.
        box: int64 [k, dimensions, 2].
    """

    rank: Integers
    parameter: Integers
    box: Integers

    def where(self, chosen: Truths | Integers) -> Regions:
        """Some of the boxes, in the same order."""
        return Regions(self.rank[chosen], self.parameter[chosen], self.box[chosen])


def regions(rank: Integers, parameter: Integers, box: Integers) -> Regions:
    """The regions of boxes in any order; empty boxes are left out."""
    filled = (box[..., 0] < box[..., 1]).all(axis=-1)
    order = np.flatnonzero(filled)
    order = order[parameter[order].argsort(kind="stable")]
    return Regions(rank[order], parameter[order], box[order])


class Meetings(NamedTuple):
    """Where boxes of two regions overlap.

    Attributes:
        own: int64 [k], index of the first region's box.
        need: int64 [k], index of the second region's box.
        box: int64 [k, dimensions, 2], what the two boxes have in common.
    """

    own: Integers
    need: Integers
    box: Integers

    def where(self, chosen: Truths | Integers) -> Meetings:
        """Some of the meetings, in the same order."""
        return Meetings(self.own[chosen], self.need[chosen], self.box[chosen])


def meet(own: Regions, need: Regions) -> Meetings:
    """Every pair of overlapping boxes, in O(n·m) array elements for each parameter."""
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
    """The given boxes of one parameter, cut at every edge of any of them into disjoint cells.

    So each given box is a union of cells. Both are int64 [number, dimensions, 2], cells ascending.
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


def copies(of: Regions) -> Integers:
    """A number for each box, the same for those that are equal: int64 [k]."""
    # By sorted columns: np.unique of whole rows takes several times as long.
    keys = [*of.box.reshape(len(of.box), 2 * of.box.shape[1]).T, of.parameter]
    order = np.lexsort(keys)
    begins = np.zeros(len(order), bool)
    for key in keys:
        begins |= np.diff(key[order], prepend=-1) != 0
    numbers = np.empty(len(order), np.int64)
    numbers[order] = begins.cumsum()
    return numbers


class WeightBucket(NamedTuple):
    """Parameters that move together.

    Attributes:
        names: of the parameters in the whole model.
        layers: the bucket is on the stages that have one of these layers.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """The parameters of a whole model, as plain numbers.

    Args:
        shapes: shape of each parameter by name, in the order of first use; a tied one has one name.
        split: tensor-parallel size -> parameter -> the dimension that is split; a parameter that is
            not named is whole on every rank. Size 1 needs no entry.
        tied: names of the parameters that embedding and head share.
        frozen: names of the parameters that get no gradients.

    Raises:
        ValueError: a parameter is in none of embed, layers and head, so that each pipeline stage
            would train a copy of it, or layers are not numbered from 0 on.
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
        """Dimensions of every box: the most that a parameter has."""
        return max(map(len, self.shapes.values()))

    @cached_property
    def buckets(self) -> tuple[WeightBucket, ...]:
        """The buckets of the embedding, tied weights, each layer and the head, if they hold any."""
        last = self.layers - 1
        embed, head = (
            tuple(n for n in self.shapes if n.startswith(end) and n not in self.tied)
            for end in ("embed.", "head.")
        )
        every = [
            WeightBucket(embed, (0,)),
            WeightBucket(tuple(name for name in self.shapes if name in self.tied), (0, last)),
            *(WeightBucket(tuple(names), (n,)) for n, names in sorted(self._of_layers.items())),
            WeightBucket(head, (last,)),
        ]
        return tuple(bucket for bucket in every if bucket.names)

    def template(self, bucket: WeightBucket, base: Schemes, schemes: Schemes) -> tuple[object, ...]:
        """A key, equal for buckets with equal layouts on the mesh ``base`` and in the step."""
        stages = [Places.of(each).stages_with(bucket.layers) for each in (base, schemes)]
        sizes = sorted({scheme.tensor for scheme in (*base[:1], *schemes)})
        dims = tuple(self.split_dim(name, size) for name in bucket.names for size in sizes)
        return (
            tuple(self.shapes[name] for name in bucket.names),
            dims,
            self.trained(bucket),
            *stages,
        )

    def trained(self, bucket: WeightBucket) -> tuple[bool, ...]:
        """Whether each parameter of a bucket gets gradients."""
        return tuple(name not in self.frozen for name in bucket.names)

    def split_dim(self, name: str, size: int) -> int | None:
        """The dimension that ``size`` tensor-parallel ranks split; None: all hold the whole.

        Raises:
            ValueError: ``split`` has no entry for this size.
        """
        if size == 1:
            return None
        if size not in self.split:
            raise ValueError(f"how tensor={size} ranks split the weights is not given.")
        return self.split[size].get(name)


def in_step(weights: Weights, bucket: WeightBucket, schemes: Schemes) -> Regions:
    """The part of a bucket that each rank holds in a step on some pipelines.

    Raises:
        ValueError: a weight that the ranks of a pipeline cannot split.
    """
    places = Places.of(schemes)
    rank = np.flatnonzero(places.holds(bucket.layers))
    size, place = places.size[rank], places.tensor[rank]
    found = []
    for name in bucket.names:
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
    parameter = np.repeat(np.arange(len(bucket.names)), len(rank))
    return regions(np.tile(rank, len(bucket.names)), parameter, np.concatenate(found))


def sharded(weights: Weights, bucket: WeightBucket, base: Schemes) -> Regions:
    """The shard of a bucket that each rank of the mesh's pipelines ``base`` holds between steps.

    Raises:
        ValueError: a weight that the ranks of a pipeline cannot split.
    """
    found = in_step(weights, bucket, base)
    places = Places.of(base)
    ranks = len(base) * base[0].context
    number = (places.pipeline * base[0].context + places.context)[found.rank]
    box = found.box
    for parameter, name in enumerate(bucket.names):
        own = np.flatnonzero(found.parameter == parameter)
        part = (box[own[0], :, 1] - box[own[0], :, 0]).tolist()[: len(weights.shapes[name])]
        dim = sharded_dim(part, ranks)
        start, stop = box[own, dim].T
        rows = -(-(stop - start) // ranks)
        box[own, dim, 0] = np.minimum(start + number[own] * rows, stop)
        box[own, dim, 1] = np.minimum(start + (number[own] + 1) * rows, stop)
    return regions(found.rank, found.parameter, box)


@dataclass(frozen=True, eq=False)
class Places:
    """Where each rank of a step's pipelines stands: arrays by global rank, int64 [ranks].

    Attributes:
        pipeline: number of the rank's pipeline.
        stage: the rank's stage in that pipeline; ``context`` and ``tensor`` are its place there.
        size: number of tensor-parallel ranks of that pipeline.
        kind: number of that pipeline's shape.
        layers: for each kind, the layers on each stage.
    """

    pipeline: Integers
    stage: Integers
    context: Integers
    tensor: Integers
    size: Integers
    kind: Integers
    layers: tuple[tuple[range, ...], ...]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(schemes: Schemes) -> Places:
        """The places of all ranks in some pipelines."""
        numbers: dict[object, int] = {}
        kinds = [numbers.setdefault(each.shape, len(numbers)) for each in schemes]
        pipeline = np.repeat(np.arange(len(schemes)), [each.size for each in schemes])
        table = [(s.context, s.tensor, s.first, k) for s, k in zip(schemes, kinds, strict=True)]
        context, size, first, kind = np.array(table)[pipeline].T
        rest, tensor = np.divmod(np.arange(len(pipeline)) - first, size)
        stage, place = np.divmod(rest, context)
        layers = tuple(schemes[kinds.index(number)].layers for number in range(len(numbers)))
        return Places(pipeline, stage, place, tensor, size, kind, layers)

    def stages_with(self, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The stages of each kind of pipeline that have one of the layers."""
        return tuple(
            tuple(stage for stage, own in enumerate(each) if any(layer in own for layer in layers))
            for each in self.layers
        )

    def holds(self, layers: Sequence[int]) -> Truths:
        """Whether each rank's stage has one of the layers."""
        held = np.zeros(len(self.stage), bool)
        for kind, stages in enumerate(self.stages_with(layers)):
            held |= (self.kind == kind) & np.isin(self.stage, stages)
        return held

    def turns(self, buckets: Sequence[tuple[int, ...]]) -> Integers:
        """When each rank uses each bucket first: int64 [ranks, buckets], -1 where it does not.

        Each rank counts its own buckets from 0 on, in the order of its layers. A tied weight comes
        before the last layer where a stage has no embedding. ``buckets`` are the layers of each
        bucket (:attr:`WeightBucket.layers`).
        """
        table = np.full((len(self.stage), len(buckets)), -1, np.int64)
        for kind, stages in enumerate(self.layers):
            for stage, own in enumerate(stages):
                here = [
                    (layers[-1 if stage else 0], number)
                    for number, layers in enumerate(buckets)
                    if any(layer in own for layer in layers)
                ]
                rows = np.flatnonzero((self.kind == kind) & (self.stage == stage))
                table[rows[:, None], [number for _, number in sorted(here)]] = np.arange(len(here))
        return table
