"""The parallel scheme of one pipeline, where the pipelines of a step differ (Hydraulis §5.1).

A run has one mesh, which says how parameters and optimizer state rest. A step may compute on other
pipelines than the mesh's: its *strategy* is one :class:`.Scheme` for each, and together they hold
every rank once. The order of ranks in a pipeline is that of a mesh: stages outermost, tensor
innermost. So tensor-parallel ranks are neighbours, and pipelines whose sizes are powers of two,
the largest first, put no such group astride two nodes.

One stage on each pipeline rank: schemes have no virtual stages.

Cost: integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_wlb.arguments import whole, wholes

Shape = tuple[tuple[int, ...], int, int]
"""Layers of each stage, context and tensor ranks: what pipelines that are alike have in common."""


@dataclass(frozen=True)
class Scheme:
    """How one pipeline of a step is spread over ranks.

    Args:
        first: its first global rank; it has the :attr:`size` ranks from there on.
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
        """All but where it is: pipelines that are alike have equal shapes."""
        return self.stages, self.context, self.tensor

    @property
    def layers(self) -> tuple[range, ...]:
        """The model's layers on each stage, by number."""
        return tuple(range(*ends) for ends in pairwise(accumulate(self.stages, initial=0)))

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, context and tensor place of one of its global ranks.

        Raises:
            ValueError: the pipeline has no such rank.
        """
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


def alike(strategy: Sequence[Scheme]) -> dict[Shape, list[int]]:
    """The numbers of the pipelines of each shape, ascending; shapes in the order of the first."""
    found: dict[Shape, list[int]] = {}
    for number, scheme in enumerate(strategy):
        found.setdefault(scheme.shape, []).append(number)
    return found
