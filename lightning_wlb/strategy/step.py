"""One step of one rank: its actions, over the open micro-batches, cached keys and messages.

A forward leaves what its backward needs: the graph that autograd has recorded, and of slices the
keys and values that later ones read. Its backward takes it, and frees all of it.

Where the plan recomputes (``ReplicaPlan.recompute``), a forward records nothing. It keeps the input
of its stage, and keys and values. A backward micro-batch puts its own input together from those of
the forward micro-batches that its slices were in, runs the stage on it, and then backward. What a
forward has kept is freed with the last backward that needs any of it.

Everything sent is contiguous and has the shape that the plan gives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lightning_wlb.attention.context_parallel import summed
from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.data.batch import MicroBatchTensors, StepBatch
from lightning_wlb.planning.units import last_uses
from lightning_wlb.schedule.actions import FORWARD, RECOMPUTED, Action
from lightning_wlb.strategy.activations import ActivationCount
from lightning_wlb.strategy.messages import Messages
from lightning_wlb.strategy.pipeline import Pipeline
from lightning_wlb.strategy.stopwatch import Stopwatch


class Step:
    """The open micro-batches of one step on one rank.

    Args:
        model: the rank's stages.
        pipeline: where the rank stands.
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
        batch: StepBatch,
        messages: Messages,
        denominator: int,
        stopwatch: Stopwatch | None,
        activations: ActivationCount | None,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self.batch = batch
        self.messages = messages
        self.cache = KeyValueCache()
        batch.share_keys(self.cache)
        self.denominator = denominator
        self.stopwatch = stopwatch
        self.activations = activations
        self.last_stage = len(pipeline.stages) - 1
        wide = torch.float64 if pipeline.dtype == torch.float64 else torch.float32
        self.loss = torch.zeros((), dtype=wide, device=pipeline.device)
        # What a stage was given and what it made of it, until its backward.
        self.boundaries: dict[Action, tuple[Tensor | None, Tensor]] = {}
        # What a stage was given, where backward runs it again.
        self.inputs: dict[Action, Tensor] = {}
        self.recomputes = batch.units.recompute
        self.last_uses = last_uses(batch.units) if self.recomputes else []

    def run(self, action: Action) -> None:
        """Run one action, its receive before it and its send after it."""
        if action.kind == FORWARD:
            with self.activations or nullcontext():
                self._forward(action)
        elif action.kind == RECOMPUTED:
            self._recompute(action)
        else:
            self._backward(action)
        if self.activations is not None:
            # What a backward leaves for others: sent gradients, those of earlier slices' keys.
            self.activations.add([*self.messages.held, *self.cache.gradients])
            self.activations.sample()

    def _forward(self, action: Action) -> None:
        micro_batch = self.batch.micro_batches[action.micro_batch]
        records = torch.is_grad_enabled() and not self.recomputes
        hidden = None
        if action.stage > 0:
            hidden = self._receive(action, action.stage - 1, micro_batch)
            hidden.requires_grad_(records)
        with self._timed(action), torch.set_grad_enabled(records):
            output = self.model(micro_batch, hidden, self.pipeline.stages[action.stage])
        if records:
            self.boundaries[action] = (hidden, output)
        elif torch.is_grad_enabled() and hidden is not None:
            self.inputs[action] = hidden
        if action.stage == self.last_stage:
            self.loss += output.detach()
        else:
            self._send(action, action.stage + 1, output.detach(), micro_batch)

    def _backward(self, action: Action) -> None:
        micro_batch = self.batch.micro_batches[action.micro_batch]
        hidden, output = self.boundaries.pop(action._replace(kind=FORWARD))
        gradient = self._gradient(action, micro_batch)
        with self._timed(action):
            torch.autograd.backward(output, self._of_loss(output, gradient))
        self.cache.drop(action.micro_batch, self.pipeline.stages[action.stage])
        if hidden is not None:
            assert hidden.grad is not None
            self._send(action, action.stage - 1, hidden.grad, micro_batch)

    def _recompute(self, action: Action) -> None:
        micro_batch = self.batch.recomputed[action.micro_batch]
        layers = self.pipeline.stages[action.stage]
        gradient = self._gradient(action, micro_batch)
        with self._timed(action):
            hidden = self._input(action.stage, micro_batch) if action.stage > 0 else None
            output = self.model(micro_batch, hidden, layers)
            torch.autograd.backward(output, self._of_loss(output, gradient))
        for forward in self.last_uses[action.micro_batch]:
            self.inputs.pop(Action(action.stage, FORWARD, forward), None)
            self.cache.drop(forward, layers)
        if hidden is not None:
            assert hidden.grad is not None
            self._send(action, action.stage - 1, hidden.grad, micro_batch)

    def _gradient(self, action: Action, micro_batch: MicroBatchTensors) -> Tensor | None:
        """That of a backward's output; None on the last stage, whose output is the loss."""
        if action.stage == self.last_stage:
            return None
        return self._receive(action, action.stage + 1, micro_batch)

    def _of_loss(self, output: Tensor, gradient: Tensor | None) -> Tensor:
        return torch.full_like(output, 1.0 / self.denominator) if gradient is None else gradient

    def _input(self, stage: int, micro_batch: MicroBatchTensors) -> Tensor:
        """The input of a backward micro-batch, [rows / TP, dim], from those that forward kept.

        Its rows lie on the context rank that they are on, but tensor ranks share them out anew.
        """
        assert micro_batch.homes is not None
        pipeline = self.pipeline
        size = pipeline.at.mesh.tensor
        shape = micro_batch.rows, pipeline.hidden_size
        rows = torch.zeros(shape, dtype=pipeline.dtype, device=pipeline.device)
        for home in micro_batch.homes:
            kept = self.inputs[Action(stage, FORWARD, home.micro_batch)]
            first = pipeline.tensor_rank * kept.shape[0]
            there = home.there - first
            # Rows of other tensor ranks count as zero in the sum over these ranks.
            mine = (there >= 0) & (there < kept.shape[0])
            values = kept.index_select(0, there.clamp(0, kept.shape[0] - 1))
            rows.index_copy_(0, home.here, values * mine[:, None])
        if size > 1:
            rows = summed(rows, pipeline.tensor_group, pipeline.dtype)
        return rows.requires_grad_()

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
