"""Runs one rank's share of a step plan: the actions of its schedule, in order, over real tensors.

The plan says how long every micro-batch is, so no message carries a size and every buffer is
allocated to measure. ``torch.distributed.pipelining`` sizes all buffers from micro-batch 0, which
aborts or silently corrupts a step whose micro-batches differ.

Communication rules (docs/design.md, "Pipeline"):

* a send is posted and waited for late: a forward send when its gradient arrives, by when the peer
  must have received it, a backward send at the step's end. Waiting at once deadlocks two
  neighbours that both send first;
* forward and backward messages have a communicator each, so that neither waits in the other's
  queue, and so have those that close the ring of virtual stages; within one, messages of a pair
  are in FIFO order, since NCCL ignores tags;
* everything sent is contiguous and has the shape that the plan gives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.plan import StepPlan
from lightning_wlb.schedule.actions import FORWARD, Action, channel_of
from lightning_wlb.schedule.timeline import Timing
from lightning_wlb.strategy import fully_sharded
from lightning_wlb.strategy.activations import ActivationCount
from lightning_wlb.strategy.collectives import gather_from_all_ranks
from lightning_wlb.strategy.merged import MergedGroups
from lightning_wlb.strategy.pipeline import Pipeline
from lightning_wlb.strategy.stopwatch import Stopwatch, make_stopwatch


class Executor:
    """Runs steps on one rank.

    Args:
        model: the stage's model, sharded by :func:`fully_sharded.shard`.
        pipeline: where the rank stands.
        merged: makes the communicators of micro-batches that several replicas share.
        counts_loss: whether this rank's loss enters the total. True for one rank of each
            tensor-parallel group: the others compute the same loss.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        merged: MergedGroups,
        counts_loss: bool = True,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self.merged = merged
        self.counts_loss = counts_loss
        self.stopwatch: Stopwatch | None = None
        self.activations: ActivationCount | None = None
        self._agreed: int | None = None

    def measure(self) -> Stopwatch:
        """Time every action from the next step on; the timings of a step stay until the next."""
        if self.stopwatch is None:
            self.stopwatch = make_stopwatch(self.pipeline.device)
            kernel = getattr(self.model, "attention_kernel", None)
            if kernel is not None:
                kernel.timer = self.stopwatch
        return self.stopwatch

    def timings(self) -> list[Timing]:
        """Timings of the last step; empty unless :meth:`measure` was called before it."""
        return self.stopwatch.timings() if self.stopwatch is not None else []

    def count_activations(self) -> ActivationCount:
        """Count what is held between forward and backward from the next step on.

        Slows every operation down: not in steps whose times matter.
        """
        if self.activations is None:
            self.activations = ActivationCount()
        return self.activations

    @property
    def peak_activation_bytes(self) -> int:
        """Of this rank's last step; 0 unless :meth:`count_activations` was called before it."""
        return 0 if self.activations is None else self.activations.peak_bytes

    def run(self, batch: StepBatch, denominator: int) -> Tensor:
        """One step of this rank: all forwards and, where gradients are enabled, all backwards.

        Gradients stay unreduced; :func:`fully_sharded.finish_step` reduces them. Collective over
        all ranks.

        Args:
            batch: this rank's part of the step.
            denominator: what the summed loss of all ranks is divided by, in tokens.

        Returns:
            The step's loss, 0-dim float32 (float64 in float64 runs), the same value on every rank.

        Raises:
            RuntimeError: naming the ranks and digests, if ranks hold different plans.
        """
        training = torch.is_grad_enabled()
        self._check_agreement(batch.plan)
        self.model.merged_groups = self.merged.prepare(batch.plan)  # type: ignore[assignment]
        fully_sharded.begin_step(self.model)
        program = self.pipeline.program(batch.plan, batch.replica, batch.units)
        if not training:
            program = [action for action in program if action.kind == FORWARD]
        step = _Step(
            self.model, self.pipeline, batch, denominator, self.stopwatch, self.activations
        )
        if self.stopwatch is not None:
            self.stopwatch.begin_step()
        if self.activations is not None:
            self.activations.begin_step()
        for action in program:
            step.run(action)
        step.finish()
        if self.activations is not None:
            self.activations.sample()
        if not training:
            fully_sharded.reshard(self.model)
        return self._total_loss(step.loss, batch, denominator)

    def _total_loss(self, loss: Tensor, batch: StepBatch, denominator: int) -> Tensor:
        """Sum the loss over ranks; the digest of the next plan travels along."""
        mine = loss if self.pipeline.last and self.counts_loss else torch.zeros_like(loss)
        bits = mine.to(torch.float64).view(torch.int64).item()
        everyone = self._all_gather([int(bits), batch.next_digest])
        self._check_digests([row[1] for row in everyone], f"step {batch.plan.step + 1}")
        self._agreed = batch.next_digest or None
        losses = torch.tensor([row[0] for row in everyone], dtype=torch.int64)
        total = losses.view(torch.float64).sum() / denominator
        return total.to(device=self.pipeline.device, dtype=loss.dtype)

    def _check_agreement(self, plan: StepPlan) -> None:
        """Do nothing where the last step's exchange already covered this plan, else exchange."""
        if self._agreed == plan.digest:
            return
        everyone = self._all_gather([plan.digest])
        self._check_digests([row[0] for row in everyone], f"step {plan.step}")

    def _all_gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.pipeline.device)
        rows: list[list[int]] = gather_from_all_ranks(mine).tolist()
        return rows

    def _check_digests(self, digests: list[int], what: str) -> None:
        if len(set(digests)) == 1:
            return
        ranks: dict[int, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks.setdefault(digest, []).append(rank)
        shown = "; ".join(f"{_name(digest)} on {_names(who)}" for digest, who in ranks.items())
        raise RuntimeError(
            f"The ranks hold different plans for {what}: {shown}. Every rank must see the same"
            " document lengths, seed and data settings: check that all nodes read the same data,"
            " use the same software versions, and pass the same arguments."
        )


def _name(digest: int) -> str:
    return f"digest {digest:016x}" if digest else "no such step"


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


class _Step:
    """The open micro-batches and messages of one step on one rank."""

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        batch: StepBatch,
        denominator: int,
        stopwatch: Stopwatch | None,
        activations: ActivationCount | None,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self.micro_batches = batch.micro_batches
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
        self.sends: dict[Action, tuple[dist.Work, Tensor]] = {}
        # Messages between two stages of this rank, by the action that they are for.
        self.local: dict[Action, Tensor] = {}

    def run(self, action: Action) -> None:
        """Run one action, its receive before it and its send after it."""
        if action.kind == FORWARD:
            with self.activations or nullcontext():
                self._forward(action)
        else:
            self._backward(action)
        if self.activations is not None:
            # What a backward leaves for others: sent gradients, those of earlier slices' keys.
            self.activations.add(tensor for _, tensor in self.sends.values())
            self.activations.add([*self.local.values(), *self.cache.gradients])
            self.activations.sample()

    def finish(self) -> None:
        """Wait for what has been sent and not been answered."""
        for work, _ in self.sends.values():
            work.wait()
        self.sends.clear()

    def _forward(self, action: Action) -> None:
        micro_batch = self.micro_batches[action.micro_batch]
        hidden = None
        if action.stage > 0:
            hidden = self._receive(action, action.stage - 1)
            hidden.requires_grad_(torch.is_grad_enabled())
        layers = self.pipeline.stages[action.stage]
        with self._timed(action):
            output = self.model(micro_batch, hidden, layers)
        if torch.is_grad_enabled():
            self.boundaries[action] = (hidden, output)
        if action.stage == self.last_stage:
            self.loss += output.detach()
        else:
            self._send(action, action.stage + 1, output.detach())

    def _backward(self, action: Action) -> None:
        forward = action._replace(kind=FORWARD)
        hidden, output = self.boundaries.pop(forward)
        if action.stage == self.last_stage:
            gradient = torch.full_like(output, 1.0 / self.denominator)
        else:
            gradient = self._receive(action, action.stage + 1)
            # Its gradient is here, so the peer has the activation: let go of it.
            if forward in self.sends:
                self.sends.pop(forward)[0].wait()
        with self._timed(action):
            torch.autograd.backward(output, gradient)
        self.cache.drop(action.micro_batch, self.pipeline.stages[action.stage])
        if hidden is not None:
            assert hidden.grad is not None
            self._send(action, action.stage - 1, hidden.grad)

    def _timed(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.stopwatch is None else self.stopwatch.action(action)

    def _shape(self, action: Action) -> tuple[int, int]:
        rows = self.micro_batches[action.micro_batch].rows
        return rows // self.pipeline.tensor_parallel_size, self.pipeline.hidden_size

    def _send(self, action: Action, stage: int, tensor: Tensor) -> None:
        """Send what ``action`` has made to the rank of the neighbouring ``stage``."""
        tensor = tensor.contiguous()
        assert tensor.shape == self._shape(action), (action, tensor.shape, self._shape(action))
        assert tensor.dtype == self.pipeline.dtype, (action, tensor.dtype, self.pipeline.dtype)
        place = stage % len(self.pipeline.ranks)
        receiver = action._replace(stage=stage)
        if place == self.pipeline.rank:
            self.local[receiver] = tensor
            return
        work = dist.isend(
            tensor, self.pipeline.ranks[place], self._group(receiver), tag=self._tag(receiver)
        )
        assert work is not None
        self.sends[action] = (work, tensor)

    def _receive(self, action: Action, stage: int) -> Tensor:
        """What ``action`` needs, from the rank of the neighbouring ``stage``."""
        place = stage % len(self.pipeline.ranks)
        if place == self.pipeline.rank:
            return self.local.pop(action)
        buffer = torch.empty(
            self._shape(action), dtype=self.pipeline.dtype, device=self.pipeline.device
        )
        work = dist.irecv(
            buffer, self.pipeline.ranks[place], self._group(action), tag=self._tag(action)
        )
        assert work is not None
        work.wait()
        return buffer

    def _group(self, receiver: Action) -> dist.ProcessGroup:
        return self.pipeline.groups[channel_of(receiver, len(self.pipeline.ranks))]

    def _tag(self, receiver: Action) -> int:
        """Names the message to an action; gloo matches by it, NCCL by order alone."""
        return receiver.micro_batch * len(self.pipeline.stages) + receiver.stage
