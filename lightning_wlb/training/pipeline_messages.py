"""Messages between the stages of a pipeline: sent without waiting, freed when received.

* A send is posted without waiting, since two neighbours that both send first would wait for each
  other, and its tensor is kept. Some later message from the same neighbour proves that the tensor
  has arrived (:func:`~lightning_wlb.schedule.actions.receipts`); then it is freed. A send that no
  message proves is waited for at the step's end.
* Each channel has its own process group, so that forward and backward messages, and those that
  close the ring of virtual stages, do not wait behind each other. Within a channel the messages of
  a pair of ranks are in FIFO order, since NCCL ignores tags.
* Over gloo a GPU's tensor passes through the host (:func:`.message_device`).
* A stage that sends to another stage of its own rank passes the tensor on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.distributed.process_groups import message_device
from lightning_wlb.mesh import Rank
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import Action, Channel, channel_of
from lightning_wlb.schedule.programs import program_of


@dataclass(frozen=True)
class PipelineRank:
    """A rank's place in its pipeline: stages, schedule, and the process groups of its messages.

    Stage s runs on place ``s % P`` of the P ranks; with V·P stages each rank has V virtual stages.
    """

    rank: Rank
    stages: tuple[range, ...]  #: layers of every stage, by global layer number
    schedule: str  #: its name in ``lightning_wlb.schedule.programs.SCHEDULES``
    groups: Mapping[Channel, dist.ProcessGroup]  #: of each channel; empty for a single rank
    hidden_size: int  #: elements per row of a boundary tensor, of ``rows / mesh.tensor`` rows
    dtype: torch.dtype
    device: torch.device
    ranks: tuple[int, ...] = ()  #: global rank at each place of the pipeline; (): those of the mesh

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.ranks or self.rank.group("pipeline"))

    def programs(self, replicas: Sequence[ReplicaPlan], number: int) -> dict[int, list[Action]]:
        """The actions of this rank and its neighbours in a step, by place in the pipeline.

        ``replicas`` are all replicas' plans, ``number`` is this rank's replica.
        """
        ranks, virtual_stages = self.rank.mesh.pipeline, self.rank.mesh.virtual_stages
        return {
            place: program_of(self.schedule, place, ranks, virtual_stages, replicas, number)
            for place in {(self.rank.pipeline + step) % ranks for step in (-1, 0, 1)}
        }


class Messages:
    """Sends and receives the boundary tensors of one step of a rank.

    ``receipts`` maps an action that receives to the actions whose sends have arrived by then.
    """

    def __init__(self, pipeline: PipelineRank, receipts: Mapping[Action, Sequence[Action]]) -> None:
        self._pipeline = pipeline
        self._receipts = receipts
        self._sends: dict[Action, tuple[dist.Work, Tensor]] = {}
        # Tensors between two stages of this rank, by the action that receives them.
        self._local: dict[Action, Tensor] = {}

    def send(self, action: Action, stage: int, tensor: Tensor) -> None:
        """Send the contiguous result of ``action`` to the rank of the neighbouring ``stage``."""
        place = stage % len(self._pipeline.ranks)
        receiver = action._replace(stage=stage)
        if place == self._pipeline.rank.pipeline:
            self._local[receiver] = tensor
            return
        group = self._group(receiver)
        tensor = tensor.to(message_device(self._pipeline.device, group))
        work = dist.isend(tensor, self._pipeline.ranks[place], group, tag=self._tag(receiver))
        assert work is not None
        self._sends[action] = (work, tensor)

    def receive(self, action: Action, stage: int, shape: tuple[int, int]) -> Tensor:
        """Receive the input of ``action`` from the rank of the neighbouring ``stage``."""
        pipeline = self._pipeline
        place = stage % len(pipeline.ranks)
        if place == pipeline.rank.pipeline:
            return self._local.pop(action)
        group = self._group(action)
        device = message_device(pipeline.device, group)
        buffer = torch.empty(shape, dtype=pipeline.dtype, device=device)
        work = dist.irecv(buffer, pipeline.ranks[place], group, tag=self._tag(action))
        assert work is not None
        work.wait()
        for sent in self._receipts.get(action, ()):
            if sent in self._sends:
                self._sends.pop(sent)[0].wait()
        return buffer.to(pipeline.device)

    def finish(self) -> None:
        """Wait for the sends that no message has acknowledged."""
        for work, _ in self._sends.values():
            work.wait()
        self._sends.clear()

    def _group(self, receiver: Action) -> dist.ProcessGroup:
        return self._pipeline.groups[channel_of(receiver, len(self._pipeline.ranks))]

    def _tag(self, receiver: Action) -> int:
        """The tag of the message to an action; gloo matches by it, NCCL by order alone."""
        return receiver.micro_batch * len(self._pipeline.stages) + receiver.stage
