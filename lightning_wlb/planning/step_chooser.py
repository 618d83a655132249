"""The interface through which a step may get other pipelines than the mesh's.

A planner plans each step on the mesh. If it has a :class:`StepChooser`, it then asks for plans on
other pipelines, and takes the :func:`fastest` of these if it is worth it. The package's chooser is
in ``heterogeneous/``, which the planner does not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lightning_wlb.plan import Piece, ReplicaPlan, Schemes
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.plan_scoring import PlanScore

WORTH_PER_MILLE = 5
"""Least simulated gain, in per mille of the step, for which a step leaves the mesh."""


class PlannedStep(NamedTuple):
    """A step on other pipelines than the mesh's."""

    schemes: Schemes  #: the pipelines
    excess: int  #: bytes by which the fullest device overflows; 0 if all fit
    time_ns: int  #: predicted, until the gradients have arrived at the shards of the parameters
    replicas: tuple[ReplicaPlan, ...]  #: the plan of each pipeline
    cap: int  #: most tokens of a micro-batch


class StepChooser(Protocol):
    """Chooses other pipelines for a step, and plans the step on them."""

    def arranged(self, pieces: Sequence[Piece], packer: Packer) -> Sequence[PlannedStep]:
        """A step of these pieces on other pipelines; none where it must stay on the mesh."""


def fastest(steps: Sequence[PlannedStep], on_mesh: PlanScore, limit: int) -> PlannedStep | None:
    """The first of the fastest plans of a step on other pipelines, if worth leaving the mesh for.

    ``limit`` is the bytes of a device that may be filled.
    """
    worth = max(on_mesh.peak - limit, 0), on_mesh.time * (1000 - WORTH_PER_MILLE) // 1000
    best = min(steps, key=lambda each: (each.excess, each.time_ns), default=None)
    return best if best is not None and (best.excess, best.time_ns) < worth else None


def check_packing(packer: Packer | type[Packer]) -> None:
    """Raise ValueError for a packing that makes micro-batches for all pipelines at once."""
    if not packer.arranges:
        raise ValueError(
            "pipelines that differ cannot share the micro-batches of this packing, which are made"
            " before they are dealt. Use packing='auto', 'slim' or 'hydraulis'."
        )
