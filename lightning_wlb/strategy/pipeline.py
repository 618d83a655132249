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
from lightning_wlb.schedule.packflow import backward_order, backward_orders, packflow
from lightning_wlb.schedule.registry import make_program
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
        """What this rank does in a step.

        A replica whose pieces are sliced runs PackFlow, whatever its micro-batches need; so does
        one that shares micro-batches with sliced replicas. Others run the schedule.

        Args:
            plan: of the step, on all replicas.
            number: this replica's.
            replica: its plan as it is executed (``planning.units``).

        Raises:
            ValueError: for sliced pieces with a schedule that is no 1F1B, or micro-batches of
                several replicas with virtual stages.
        """
        ranks = len(self.ranks)
        per_rank = len(self.stages) // ranks
        merged = any(len(group.replicas) > 1 for group in replica.forward)
        if merged and per_rank > 1:
            raise ValueError(
                f"replica {number} shares micro-batches with others, which needs one stage per"
                f" pipeline rank, not {per_rank}: replicas with unlike numbers of micro-batches"
                " would meet in different orders. Use schedule='1f1b', or a packing that does not"
                " merge replicas."
            )
        sliced = plan.replicas if merged else [replica]
        if not any(part.context for each in sliced for part in each.slices):
            return make_program(self.schedule, self.rank, ranks, len(replica.forward), per_rank)
        if self.schedule not in ("1f1b", "interleaved"):
            raise ValueError(
                f"the plan slices pieces over micro-batches, which schedule={self.schedule!r}"
                " does not run: their backward has another order. Use schedule='1f1b' or"
                " 'interleaved', or a packing that keeps pieces whole."
            )
        order = backward_orders(plan.replicas)[number] if merged else backward_order(replica)
        return packflow(self.rank, ranks, *order, per_rank)


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
