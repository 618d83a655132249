"""The pipeline that a rank is in, and the communicators between its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from lightning_wlb.mesh import Rank
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, Channel
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.strategy.collectives import own_group


@dataclass(frozen=True)
class Pipeline:
    """The pipeline that a rank is in: its stages, its schedule, and how its messages travel.

    Stage s runs on place ``s % P`` of the pipeline's P ranks: with as many stages as ranks each
    has one, with V times as many each has V (virtual stages).

    Args:
        at: where this rank stands in the mesh.
        stages: layers of every stage, by global layer number.
        schedule: name of the schedule (``lightning_wlb.schedule.programs.SCHEDULES``).
        groups: the communicator of each channel; empty for a single rank.
        hidden_size: elements per row of a boundary tensor, which has ``rows / mesh.tensor`` rows.
        dtype: of boundary tensors.
        device: of boundary tensors.
    """

    at: Rank
    stages: tuple[range, ...]
    schedule: str
    groups: Mapping[Channel, dist.ProcessGroup]
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global rank at each place of the pipeline."""
        return self.at.group("pipeline")

    def programs(self, replicas: Sequence[ReplicaPlan], number: int) -> dict[int, list[Action]]:
        """What this rank and its neighbours do in a step, by place in the pipeline.

        See :func:`~lightning_wlb.schedule.programs.program_of`.

        Args:
            replicas: plans of all replicas, as they are executed (``prediction.executed``).
            number: this replica's.
        """
        ranks, virtual_stages = self.at.mesh.pipeline, self.at.mesh.virtual_stages
        return {
            place: program_of(self.schedule, place, ranks, virtual_stages, replicas, number)
            for place in {(self.at.pipeline + step) % ranks for step in (-1, 0, 1)}
        }


def pipeline_groups(at: Rank, timeout: timedelta | None) -> dict[Channel, dist.ProcessGroup]:
    """A communicator over this rank's pipeline for each channel of messages; collective.

    With virtual stages, messages also go from the last rank to the first and back.

    Args:
        at: where this rank stands.
        timeout: how long an operation may wait.
    """
    mesh = at.mesh
    if mesh.pipeline == 1:
        return {}
    pipelines = mesh.groups("pipeline").tolist()
    mine = {}
    for closes_ring in (False, True) if mesh.virtual_stages > 1 else (False,):
        for kind in (FORWARD, BACKWARD):
            group = own_group(pipelines, at.index, timeout)
            assert group is not None
            mine[Channel(kind, closes_ring)] = group
    return mine
