"""Messages between the stages of a pipeline: sent without waiting, let go of when received.

* A send is posted, its tensor and handle kept, and waited for late: waiting at once deadlocks two
  neighbours that both send first. When a message comes back that the peer sent after it had
  received this one (:mod:`~lightning_wlb.schedule.receipts`), the wait returns at once and the
  tensor is let go of; the rest is waited for at the step's end.
* Forward and backward messages have a communicator each, so that neither waits in the other's
  queue, and so have those that close the ring of virtual stages; within one, messages of a pair
  are in FIFO order, since NCCL ignores tags.
* A stage that sends to another one of its own rank passes the tensor on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.schedule.actions import Action, channel_of
from lightning_wlb.strategy.pipeline import Pipeline


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
