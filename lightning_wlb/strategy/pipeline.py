"""Where a rank stands in its pipeline, and the communicators between the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, Channel
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.strategy.collectives import own_group
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

    def programs(self, replicas: Sequence[ReplicaPlan], number: int) -> dict[int, list[Action]]:
        """What this rank and its neighbours do in a step, by place in the pipeline.

        See :func:`~lightning_wlb.schedule.programs.program_of`.

        Args:
            replicas: plans of all replicas, as they are executed (``planning.units``).
            number: this replica's.
        """
        ranks = len(self.ranks)
        per_rank = len(self.stages) // ranks
        return {
            place: program_of(self.schedule, place, ranks, per_rank, replicas, number)
            for place in {(self.rank + step) % ranks for step in (-1, 0, 1)}
        }


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
    pipelines = [
        [sizes.rank(data, place, context, tensor) for place in range(sizes.pipeline)]
        for data, context, tensor in product(
            range(sizes.data), range(sizes.context), range(sizes.tensor)
        )
    ]
    for channel in channels:
        group = own_group(pipelines, rank, timeout)
        assert group is not None
        mine[channel] = group
    return mine
