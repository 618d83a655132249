"""The seam at which steps leave the mesh: who chooses other pipelines for a step, if anybody does.

A planner plans each step on the mesh. Given a :class:`StepChooser` it asks then whether other
pipelines are faster, and takes their plan if so. The choosers of this package are in
``heterogeneous/``; a planner without one costs nothing and knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lightning_wlb.plan import Piece, ReplicaPlan, Schemes
from lightning_wlb.planning.packing.base import Packer, Rules
from lightning_wlb.planning.plan_scoring import PlanScore


class PlannedStep(NamedTuple):
    """A step on other pipelines than the mesh's.

    Attributes:
        schemes: the pipelines.
        excess: bytes by which the fullest device overflows; 0 if all fit.
        time_ns: predicted, until the gradients have arrived where parameters are sharded.
        replicas: the plan of each pipeline.
        cap: most tokens that a micro-batch may have.
    """

    schemes: Schemes
    excess: int
    time_ns: int
    replicas: tuple[ReplicaPlan, ...]
    cap: int


class StepChooser(Protocol):
    """Chooses the pipelines of a step and plans it there."""

    def choose(
        self,
        pieces: Sequence[Piece],
        rules: Rules,
        packer: Callable[[Rules], Packer],
        on_mesh: PlanScore,
        limit: int,
    ) -> PlannedStep | None:
        """The step on other pipelines; None: it stays on the mesh.

        Args:
            pieces: all that enter the step.
            rules: the run's data settings, resolved.
            packer: makes the run's packing.
            on_mesh: the step on the mesh.
            limit: bytes of a device that may be filled.
        """


def check_packing(packer: Packer | type[Packer]) -> None:
    """Refuse a packing that cannot be used with pipelines that differ.

    Raises:
        ValueError: it makes micro-batches for all pipelines at once.
    """
    if not packer.arranges:
        raise ValueError(
            "pipelines that differ cannot share the micro-batches of this packing, which are made"
            " before they are dealt. Use packing='auto', 'slim' or 'hydraulis'."
        )
