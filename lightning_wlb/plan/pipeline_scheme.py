"""The parallel scheme of one pipeline, where the pipelines of a step differ (Hydraulis §5.1).

A run has one mesh, over which parameters and optimizer state are sharded. A step may compute on
other pipelines than the mesh's: its :data:`Schemes` are one :class:`.Scheme` for each pipeline, and
together they hold every rank once. The order of ranks in a pipeline is that of a mesh: stages
outermost, tensor innermost. So tensor-parallel ranks are neighbours, and if pipeline sizes are
powers of two in descending order, no tensor-parallel group crosses a node. No virtual stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_wlb.argument_checks import whole, wholes
from lightning_wlb.mesh import Mesh, Rank

Shape = tuple[tuple[int, ...], int, int]
"""Layers of each stage, context ranks and tensor ranks; pipelines of equal shape are *alike*."""


@dataclass(frozen=True)
class Scheme:
    """How one pipeline of a step is spread over ranks.

    Args:
        first: its first global rank; it takes :attr:`size` consecutive ranks.
        stages: decoder layers of each stage, the model's first layers in the first stage.
        context: ranks that share the tokens of a micro-batch.
        tensor: ranks that share each weight.

    Raises:
        ValueError: a size is not a whole number of at least 1 (``first``: 0), or there is no stage.
    """

    first: int
    stages: tuple[int, ...]
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", whole("scheme: first", self.first, 0))
        object.__setattr__(self, "stages", wholes("scheme: stages", self.stages, 1))
        for name in ("context", "tensor"):
            object.__setattr__(self, name, whole(f"scheme: {name}", getattr(self, name), 1))
        if not self.stages:
            raise ValueError("scheme: stages=() holds no layer. Give the layers of each stage.")

    @property
    def size(self) -> int:
        """Ranks of the pipeline."""
        return len(self.stages) * self.context * self.tensor

    @property
    def ranks(self) -> range:
        """Its global ranks."""
        return range(self.first, self.first + self.size)

    @property
    def shape(self) -> Shape:
        """Layers of each stage, context and tensor ranks: equal for pipelines that are alike."""
        return self.stages, self.context, self.tensor

    @property
    def layers(self) -> tuple[range, ...]:
        """The model's layers on each stage, by number."""
        return tuple(range(*ends) for ends in pairwise(accumulate(self.stages, initial=0)))

    def mesh(self, pipelines: int = 1) -> Mesh:
        """The mesh of ``pipelines`` pipelines like this one."""
        return Mesh(pipelines, len(self.stages), self.context, self.tensor)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, context and tensor place of one of its global ranks; ValueError for another."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the pipeline on {self}.")
        rest, tensor = divmod(rank - self.first, self.tensor)
        return *divmod(rest, self.context), tensor

    def __str__(self) -> str:
        layers = "+".join(map(str, self.stages))
        return (
            f"ranks [{self.first}, {self.ranks.stop}): context {self.context} × tensor"
            f" {self.tensor}, layers {layers}"
        )


Schemes = tuple[Scheme, ...]
"""The pipelines of a step, on consecutive ranks from 0 on."""


def check_schemes(where: str, schemes: Sequence[Scheme]) -> None:
    """Raise ValueError for pipelines that skip or share ranks, or lack a part of the model.

    The message begins with ``where``.
    """
    first, layers = 0, sum(schemes[0].stages)
    for number, scheme in enumerate(schemes):
        if scheme.first != first:
            raise ValueError(
                f"{where}: pipeline {number}, on {scheme}, begins at rank {scheme.first}, but the"
                f" next free rank is {first}. Pipelines take consecutive ranks from 0 on."
            )
        first = scheme.ranks.stop
        if sum(scheme.stages) != layers:
            raise ValueError(
                f"{where}: the stages of pipeline {number}, on {scheme}, have {sum(scheme.stages)}"
                f" layers, those of pipeline 0 {layers}. Every pipeline holds the whole model."
            )


def schemes_of(mesh: Mesh, stages: Sequence[range]) -> Schemes:
    """A mesh's replicas as schemes, given its stages' layers; ValueError for virtual stages."""
    if mesh.virtual_stages > 1:
        raise ValueError(
            f"virtual_stages={mesh.virtual_stages}, but pipelines that differ have one stage on"
            " each rank. Use schedule='1f1b'."
        )
    layers = tuple(map(len, stages))
    size = mesh.devices // mesh.data
    firsts = range(0, mesh.devices, size)
    return tuple(Scheme(first, layers, mesh.context, mesh.tensor) for first in firsts)


def rank_in(schemes: Schemes, number: int) -> Rank:
    """The place of a global rank in its pipeline, for which the data of a step are made.

    The result's mesh has as many pipelines as ``schemes``, all of the shape of the rank's own.
    """
    at, scheme = next((at, each) for at, each in enumerate(schemes) if number in each.ranks)
    return Rank(scheme.mesh(len(schemes)), at, *scheme.place(number))


def alike(schemes: Sequence[Scheme]) -> dict[Shape, list[int]]:
    """The numbers of the pipelines of each shape, ascending; shapes in order of appearance."""
    found: dict[Shape, list[int]] = {}
    for number, scheme in enumerate(schemes):
        found.setdefault(scheme.shape, []).append(number)
    return found
