"""Which rank holds which part of each parameter: sharded between steps, and whole in a step.

*Sharded*: between steps the run's mesh holds parameters and optimizer state. Each pipeline rank has
its stages, weights are split over the tensor axis, and FSDP2 shards each rank's part over data ×
context. A parameter that is not split, such as a norm, is the same on all tensor-parallel ranks,
and the ranks of the embedding and of the head both hold a tied weight.

*In a step* a rank of a pipeline holds its stage whole, or its tensor-parallel part of it.

Parameters move in *buckets*: a layer, the embedding, the head, or the weight that both share. A
rank holds one *box* of a parameter: a range of indices in every dimension. The boxes of all ranks
are one array, int64 [ranks, dimensions, 2] of start and stop; a box may be empty.

Cost: O(ranks) array elements for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.mesh import sharded_dim
from lightning_wlb.plan import Schemes

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]


class WeightBucket(NamedTuple):
    """Parameters that move together."""

    names: tuple[str, ...]  #: names of the parameters in the whole model
    layers: tuple[int, ...]  #: the bucket is on the stages that have one of these layers


@dataclass(frozen=True)
class Weights:
    """The parameters of a whole model, as plain numbers.

    Raises:
        ValueError: a parameter is in none of embed, layers and head, so that each pipeline stage
            would train a copy of it, or layers are not numbered from 0 on.
    """

    #: shape of each parameter by name, in the order of first use; a tied one has one name
    shapes: Mapping[str, tuple[int, ...]]
    #: tensor-parallel size -> parameter -> the dimension that is split; other parameters are whole
    #: on every rank. Size 1 needs no entry
    split: Mapping[int, Mapping[str, int]]
    tied: frozenset[str] = frozenset()  #: names of the parameters that embedding and head share
    frozen: frozenset[str] = frozenset()  #: names of the parameters that get no gradients

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


def in_step(weights: Weights, bucket: WeightBucket, schemes: Schemes) -> dict[str, Integers]:
    """The box of each parameter of a bucket that every rank holds in a step on some pipelines.

    Raises:
        ValueError: a weight that the ranks of a pipeline cannot split.
    """
    places = Places.of(schemes)
    held = np.array([any(layer in own for layer in bucket.layers) for own in places.layers])
    found = {}
    for name in bucket.names:
        shape = weights.shapes[name]
        box = np.zeros((len(held), len(shape), 2), np.int64)
        box[held, :, 1] = shape
        for tensor in np.unique(places.size[held]).tolist():
            dim = weights.split[tensor].get(name) if tensor > 1 else None
            if dim is None:
                continue
            if shape[dim] % tensor:
                raise ValueError(
                    f"dimension {dim} of {name}, of shape {shape}, does not divide by"
                    f" tensor={tensor}. Choose a size that divides it."
                )
            own = held & (places.size == tensor)
            box[own, dim] = np.add(places.tensor[own, None], [0, 1]) * (shape[dim] // tensor)
        found[name] = box
    return found


def sharded(weights: Weights, bucket: WeightBucket, base: Schemes) -> dict[str, Integers]:
    """As :func:`in_step`, but the boxes that the mesh of pipelines ``base`` holds between steps."""
    found, places = in_step(weights, bucket, base), Places.of(base)
    ranks = len(base) * base[0].context
    number = (places.pipeline * base[0].context + places.context)[:, None]
    for box in found.values():
        dim = sharded_dim((box[..., 1] - box[..., 0]).max(axis=0).tolist(), ranks)
        start, stop = box[:, dim, :1], box[:, dim, 1:]
        rows = -(-(stop - start) // ranks)
        box[:, dim] = np.minimum(start + np.add(number, [0, 1]) * rows, stop)
    return found


@dataclass(frozen=True, eq=False)
class Places:
    """Where each rank of a step's pipelines stands: arrays by global rank, int64 [ranks]."""

    pipeline: Integers  #: the rank's pipeline; ``context`` and ``tensor`` are its place there
    context: Integers
    tensor: Integers
    size: Integers  #: number of tensor-parallel ranks of that pipeline
    layers: tuple[range, ...]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(schemes: Schemes) -> Places:
        """The places of all ranks in some pipelines."""
        pipeline = np.repeat(np.arange(len(schemes)), [each.size for each in schemes])
        table = np.array([(each.context, each.tensor, each.first) for each in schemes])
        context, size, first = table[pipeline].T
        rest, tensor = np.divmod(np.arange(len(pipeline)) - first, size)
        stage, place = np.divmod(rest, context)
        own = (schemes[number].layers[at] for number, at in zip(pipeline, stage, strict=True))
        return Places(pipeline, place, tensor, size, tuple(own))

    def turns(self, buckets: Sequence[tuple[int, ...]]) -> Integers:
        """The turn in which each rank first uses each bucket, int64 [ranks, buckets]; -1: never.

        Each rank counts its own buckets from 0 on, in the order of its layers. In a stage without
        the embedding a tied weight comes before the last layer. ``buckets``: their layers.
        """

        @cache
        def of_stage(own: range) -> list[int]:
            here = sorted(
                (layers[0 if layers[0] in own else -1], number)
                for number, layers in enumerate(buckets)
                if any(layer in own for layer in layers)
            )
            turn_of = {number: turn for turn, (_, number) in enumerate(here)}
            return [turn_of.get(number, -1) for number in range(len(buckets))]

        return np.array([of_stage(own) for own in self.layers], np.int64)
