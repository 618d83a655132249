"""Messages between the stages of a pipeline: sent without waiting, let go of when received.

* A send is posted, its tensor and handle kept, and waited for late: waiting at once deadlocks two
  neighbours that both send first. When a message comes back that the peer sent after it had
  received this one (:mod:`~lightning_wlb.schedule.receipts`), the wait returns at once and the
  tensor is let go of; the rest is waited for at the step's end.
* Forward and backward messages have a process group each, so that neither waits in the other's
  queue, and so have those that close the ring of virtual stages; within one, messages of a pair
  are in FIFO order, since NCCL ignores tags.
* A stage that sends to another one of its own rank passes the tensor on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.mesh import Rank
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import Action, Channel, channel_of
from lightning_wlb.schedule.programs import program_of


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


class Messages:
    """Those of one step on one rank.

    Args:
        pipeline: where the rank stands.
        receipts: for an action that receives, the actions whose sends have then been received.

    Attributes:
        most_held: most sends that were held at once.
    """

    def __init__(self, pipeline: Pipeline, receipts: Mapping[Action, Sequence[Action]]) -> None:
        self._pipeline = pipeline
        self._receipts = receipts
        self._sends: dict[Action, tuple[dist.Work, Tensor]] = {}
        # Between two stages of this rank, by the action that they are for.
        self._local: dict[Action, Tensor] = {}
        self.most_held = 0

    @property
    def held(self) -> list[Tensor]:
        """What has been sent and may still be on its way."""
        return [*(tensor for _, tensor in self._sends.values()), *self._local.values()]

    def send(self, action: Action, stage: int, tensor: Tensor) -> None:
        """Send what ``action`` has made to the rank of the neighbouring ``stage``; contiguous."""
        place = stage % len(self._pipeline.ranks)
        receiver = action._replace(stage=stage)
        if place == self._pipeline.at.pipeline:
            self._local[receiver] = tensor
            return
        work = dist.isend(
            tensor, self._pipeline.ranks[place], self._group(receiver), tag=self._tag(receiver)
        )
        assert work is not None
        self._sends[action] = (work, tensor)
        self.most_held = max(self.most_held, len(self._sends))

    def receive(self, action: Action, stage: int, shape: tuple[int, int]) -> Tensor:
        """What ``action`` needs, from the rank of the neighbouring ``stage``."""
        pipeline = self._pipeline
        place = stage % len(pipeline.ranks)
        if place == pipeline.at.pipeline:
            return self._local.pop(action)
        buffer = torch.empty(shape, dtype=pipeline.dtype, device=pipeline.device)
        work = dist.irecv(buffer, pipeline.ranks[place], self._group(action), tag=self._tag(action))
        assert work is not None
        work.wait()
        for sent in self._receipts.get(action, ()):
            if sent in self._sends:
                self._sends.pop(sent)[0].wait()
        return buffer

    def finish(self) -> None:
        """Wait for what has been sent and not been answered."""
        for work, _ in self._sends.values():
            work.wait()
        self._sends.clear()

    def _group(self, receiver: Action) -> dist.ProcessGroup:
        return self._pipeline.groups[channel_of(receiver, len(self._pipeline.ranks))]

    def _tag(self, receiver: Action) -> int:
        """Names the message to an action; gloo matches by it, NCCL by order alone."""
        return receiver.micro_batch * len(self._pipeline.stages) + receiver.stage
