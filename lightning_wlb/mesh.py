"""The mesh of ranks, data × pipeline × context × tensor, and where one of them stands in it.

A run makes one :class:`Mesh` and, on every rank, one :class:`Rank`, and passes both unchanged on.

Rank order: data outermost, tensor innermost. So tensor parallelism, which communicates most, stays
within a node, and data parallelism, which communicates once a step, crosses nodes (WLB-LLM §6.1).

Everything is integer arithmetic. :meth:`Mesh.groups` and :meth:`Rank.group` enumerate all ranks of
the mesh: call them when a run is set up, not for every message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_wlb.argument_checks import whole

AXES = ("data", "pipeline", "context", "tensor")
"""Names of the axes, outermost first."""


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, and the stages of a pipeline rank.

    Args:
        data: replicas that train on different documents.
        pipeline: ranks that share the layers of a replica.
        context: ranks that share the tokens of a micro-batch.
        tensor: ranks that share each weight.
        virtual_stages: stages of each pipeline rank; stage s is on rank ``s % pipeline``.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    data: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = whole(f"mesh: {field.name}", getattr(self, field.name), 1)
            object.__setattr__(self, field.name, size)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the axes, in the order of :data:`AXES`."""
        return self.data, self.pipeline, self.context, self.tensor

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def stages(self) -> int:
        """Stages of a pipeline, virtual ones counted."""
        return self.pipeline * self.virtual_stages

    def coordinate(self, index: int) -> Rank:
        """The rank with a global rank number: the inverse of :attr:`Rank.index`.

        Raises:
            ValueError: the mesh has no such rank.
        """
        rest, tensor = divmod(index, self.tensor)
        rest, context = divmod(rest, self.context)
        data, pipeline = divmod(rest, self.pipeline)
        return Rank(self, data, pipeline, context, tensor)

    def groups(self, *axes: str) -> npt.NDArray[np.int64]:
        """Global rank numbers of the process groups that span some axes.

        Returns:
            int64 [groups, ranks of a group]; within a group the last of ``axes`` varies fastest.
        """
        inner = [AXES.index(axis) for axis in axes]
        outer = [number for number in range(len(AXES)) if number not in inner]
        size = math.prod(self.shape[number] for number in inner)
        ranks = np.arange(self.devices).reshape(self.shape)
        return ranks.transpose(outer + inner).reshape(-1, size)

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))


ONE_DEVICE = Mesh()


@dataclass(frozen=True)
class Rank:
    """Where one rank stands in the mesh.

    Args:
        mesh: the mesh that the rank belongs to.
        data, pipeline, context, tensor: its place on each axis, from 0 to the axis' size less one.

    Raises:
        ValueError: the mesh has no such place.
    """

    mesh: Mesh = ONE_DEVICE
    data: int = 0
    pipeline: int = 0
    context: int = 0
    tensor: int = 0

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.mesh.shape, strict=True):
            place = whole(axis, getattr(self, axis))
            if not 0 <= place < size:
                raise ValueError(
                    f"{axis}={place} is not in [0, {size}): give a place on the mesh {self.mesh}."
                )
            object.__setattr__(self, axis, place)

    @property
    def index(self) -> int:
        """The global rank number."""
        outer = (self.data * self.mesh.pipeline + self.pipeline) * self.mesh.context + self.context
        return outer * self.mesh.tensor + self.tensor

    @property
    def first_stage(self) -> bool:
        """Whether the rank holds the embedding and needs tokens."""
        return self.pipeline == 0

    @property
    def last_stage(self) -> bool:
        """Whether the rank holds the head, needs labels and computes the loss."""
        return self.pipeline == self.mesh.pipeline - 1

    def group(self, *axes: str) -> tuple[int, ...]:
        """Global rank numbers of the group in :meth:`Mesh.groups` that holds this rank."""
        groups = self.mesh.groups(*axes)
        (own,) = groups[(groups == self.index).any(axis=1)].tolist()
        return tuple(own)


def sharded_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which ``ranks`` ranks shard a parameter.

    It is the first, as in FSDP2, unless that is smaller than ``ranks`` and ``ranks`` divides
    another dimension. Otherwise two ranks would hold a parameter of two rows, such as a packed
    projection or a low-rank adapter, and the others nothing of it.

    Args:
        shape: sizes of the parameter, or of its part on one tensor-parallel rank.
        ranks: number of ranks along the data and context axes together.
    """
    if not shape or shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), 0)
