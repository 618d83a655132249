"""Where a rank stands in its pipeline, and the communicators between the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from lightning_wlb.plan import ReplicaPlan, StepPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, Channel
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.strategy.mesh import MeshSizes


@dataclass(frozen=True)
class Pipeline:
    """Where a rank stands in its pipeline.

    Stage s runs on place ``s % P`` of the pipeline's P ranks: with as many stages as ranks each
    has one, with V times as many each has V (virtual stages).

    Args:
        rank: this rank's place in the pipeline.
        ranks: global rank at each place.
        stages: layers of every stage, by global layer number.
        schedule: name of the schedule (``lightning_wlb.schedule.registry.SCHEDULES``).
        groups: the communicator of each channel; empty for a single rank.
        tensor_parallel_size: a boundary tensor has ``rows / tensor_parallel_size`` rows.
        hidden_size: elements per row of a boundary tensor.
        dtype: of boundary tensors.
        device: of boundary tensors.
    """

    rank: int
    ranks: tuple[int, ...]
    stages: tuple[range, ...]
    schedule: str
    groups: Mapping[Channel, dist.ProcessGroup]
    tensor_parallel_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def last(self) -> bool:
        """Whether this rank computes the loss."""
        return (len(self.stages) - 1) % len(self.ranks) == self.rank

    def program(self, plan: StepPlan, number: int, replica: ReplicaPlan) -> list[Action]:
        """What this rank does in a step, see :func:`~lightning_wlb.schedule.programs.program_of`.

        Args:
            plan: of the step, on all replicas.
            number: this replica's.
            replica: its plan as it is executed (``planning.units``).
        """
        ranks = len(self.ranks)
        per_rank = len(self.stages) // ranks
        return program_of(self.schedule, self.rank, ranks, per_rank, plan.replicas, number, replica)


def pipeline_groups(
    sizes: MeshSizes, rank: int, ring: bool, timeout: timedelta | None
) -> dict[Channel, dist.ProcessGroup]:
    """A communicator over this rank's pipeline for each channel of messages; collective.

    Args:
        sizes: of the mesh.
        rank: this global rank.
        ring: whether messages also go from the last rank to the first and back, as they do with
            several stages per rank.
        timeout: how long an operation may wait.
    """
    if sizes.pipeline == 1:
        return {}
    mine = {}
    channels = [
        Channel(kind, closes_ring)
        for closes_ring in ((False, True) if ring else (False,))
        for kind in (FORWARD, BACKWARD)
    ]
    # Every rank creates every group, in the same order.
    for channel in channels:
        for data, context, tensor in product(
            range(sizes.data), range(sizes.context), range(sizes.tensor)
        ):
            ranks = [sizes.rank(data, place, context, tensor) for place in range(sizes.pipeline)]
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                mine[channel] = group
    return mine
