"""One step of one rank: its actions, over the open micro-batches, cached keys and messages.

A forward leaves what its backward needs: the graph that autograd has recorded, and of slices the
keys and values that later ones read. Its backward takes it, and frees all of it.

Everything sent is contiguous and has the shape that the plan gives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.process_groups import ProcessGroups
from lightning_wlb.data.batch import MicroBatchTensors, StepBatch
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.strategy.activations import ActivationCount
from lightning_wlb.strategy.messages import Messages
from lightning_wlb.strategy.pipeline import Pipeline
from lightning_wlb.strategy.stopwatch import Stopwatch


class Step:
    """The open micro-batches of one step on one rank.

    Args:
        model: the rank's stages.
        pipeline: where the rank stands.
        groups: what the model's forward communicates over.
        batch: this rank's part of the step.
        messages: to and from the other stages.
        denominator: what the summed loss of all ranks is divided by, in tokens.
        stopwatch: times every action, if given.
        activations: counts what is held after every action, if given.

    Attributes:
        loss: sum of this rank's token losses, 0-dim, in at least float32.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        groups: ProcessGroups,
        batch: StepBatch,
        messages: Messages,
        denominator: int,
        stopwatch: Stopwatch | None,
        activations: ActivationCount | None,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self.groups = groups
        self.batch = batch
        self.messages = messages
        self.cache = KeyValueCache()
        self.denominator = denominator
        self.stopwatch = stopwatch
        self.activations = activations
        self.last_stage = len(pipeline.stages) - 1
        wide = torch.float64 if pipeline.dtype == torch.float64 else torch.float32
        self.loss = torch.zeros((), dtype=wide, device=pipeline.device)
        # What a stage was given and what it made of it, until its backward.
        self.boundaries: dict[Action, tuple[Tensor | None, Tensor]] = {}

    def run(self, action: Action) -> None:
        """Run one action, its receive before it and its send after it."""
        if action.kind == FORWARD:
            with self.activations or nullcontext():
                self._forward(action)
        else:
            self._backward(action)
        if self.activations is not None:
            # What a backward leaves for others: sent gradients, those of earlier slices' keys.
            self.activations.add([*self.messages.held, *self.cache.gradients])
            self.activations.sample()

    def _forward(self, action: Action) -> None:
        micro_batch = self.batch.micro_batches[action.micro_batch]
        training = torch.is_grad_enabled()
        hidden = None
        if action.stage > 0:
            hidden = self._receive(action, action.stage - 1, micro_batch)
            hidden.requires_grad_(training)
        with self._timed(action):
            output = self.model(
                micro_batch.with_cache(self.cache),
                hidden,
                self.pipeline.stages[action.stage],
                groups=self.groups,
            )
        if training:
            self.boundaries[action] = (hidden, output)
        if action.stage == self.last_stage:
            self.loss += output.detach()
        else:
            self._send(action, action.stage + 1, output.detach(), micro_batch)

    def _backward(self, action: Action) -> None:
        micro_batch = self.batch.micro_batches[action.micro_batch]
        hidden, output = self.boundaries.pop(action._replace(kind=FORWARD))
        if action.stage == self.last_stage:
            gradient = torch.full_like(output, 1.0 / self.denominator)
        else:
            gradient = self._receive(action, action.stage + 1, micro_batch)
        with self._timed(action):
            torch.autograd.backward(output, gradient)
        self.cache.drop(action.micro_batch, self.pipeline.stages[action.stage])
        if hidden is not None:
            assert hidden.grad is not None
            self._send(action, action.stage - 1, hidden.grad, micro_batch)

    def _timed(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.stopwatch is None else self.stopwatch.action(action)

    def _shape(self, micro_batch: MicroBatchTensors) -> tuple[int, int]:
        return micro_batch.rows // self.pipeline.at.mesh.tensor, self.pipeline.hidden_size

    def _send(
        self, action: Action, stage: int, tensor: Tensor, micro_batch: MicroBatchTensors
    ) -> None:
        tensor = tensor.contiguous()
        wanted = self._shape(micro_batch)
        assert tensor.shape == wanted, (action, tensor.shape, wanted)
        assert tensor.dtype == self.pipeline.dtype, (action, tensor.dtype, self.pipeline.dtype)
        self.messages.send(action, stage, tensor)

    def _receive(self, action: Action, stage: int, micro_batch: MicroBatchTensors) -> Tensor:
        return self.messages.receive(action, stage, self._shape(micro_batch))
