"""Runs one rank's part of a step plan: the actions of its schedule, in order, over real tensors.

The plan says how long every micro-batch is, so no message carries a size, and every buffer is
allocated in the size that the plan gives.

A forward leaves what its backward needs: the graph that autograd has recorded and, where pieces are
sliced, the keys and values that later slices read. Its backward frees all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.data.batch import MicroBatchTensors, StepBatch
from lightning_wlb.distributed.collective_errors import Ranks, differences
from lightning_wlb.distributed.collectives import reducing_in
from lightning_wlb.distributed.process_groups import (
    MeshGroups,
    ProcessGroups,
    gather_from_all_ranks,
)
from lightning_wlb.mesh import Rank
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.plan import StepPlan
from lightning_wlb.profiling.action_stopwatch import Stopwatch
from lightning_wlb.schedule.actions import FORWARD, Action, Timing, receipts
from lightning_wlb.supervision.progress import EXCHANGING, PROGRESS, REDUCING, RUNNING
from lightning_wlb.supervision.signals import NOTICES
from lightning_wlb.training.bucket_lifetimes import StepParameters
from lightning_wlb.training.pipeline_messages import Messages, PipelineRank


@dataclass(frozen=True)
class StepRuntime:
    """What a rank runs one step on: the mesh, or heterogeneous pipelines."""

    model: Decoder
    pipeline: PipelineRank
    groups: ProcessGroups
    parameters: StepParameters


@dataclass(eq=False, repr=False)
class Executor:
    """Runs steps on one rank.

    Attributes:
        heterogeneous: makes the :class:`StepRuntime` of a plan with pipelines of its own; None:
            such a plan is refused.
        reduce_dtype: dtype in which tensor- and context-parallel ranks add up.
        chunks: see :class:`.ProcessGroups`.
        losses: the summed token losses of every rank in the last step, in rank order; 0 for ranks
            of earlier stages, and for all but the first rank of a tensor-parallel group.
        settings: a digest of the options of this rank's optimizers, for the ranks' exchange.
        settings_agree: whether the ranks of each stage had the same digest in the last step.
    """

    model: Decoder
    pipeline: PipelineRank
    groups: MeshGroups
    parameters: StepParameters

    def __post_init__(self) -> None:
        self.heterogeneous: Callable[[StepPlan], StepRuntime] | None = None
        self.bucket_lifetimes = self.parameters
        self.reduce_dtype = torch.float32
        self.chunks: Callable[[int, int], int] | None = None
        self.stopwatch: Stopwatch | None = None
        self.losses: list[float] = []
        self.settings, self.settings_agree = 0, True
        self._agreed: int | None = None  # digest of the next plan, which all ranks hold
        # The last step and the ranks' exchange at its end, until that is read.
        self._told: tuple[StepBatch, Tensor] | None = None

    def begin(
        self, reduce_dtype: torch.dtype, chunks: Callable[[int, int], int] | None = None
    ) -> None:
        """Begin a run with this ``reduce_dtype`` and ``chunks``.

        An earlier run's plan is forgotten: it may have ended before all ranks had agreed on it.
        """
        self.reduce_dtype, self.chunks = reduce_dtype, chunks
        self._agreed = self._told = None

    def measure(self) -> Stopwatch:
        """Time every action from the next step on; the timings of a step stay until the next."""
        if self.stopwatch is None:
            self.stopwatch = Stopwatch(self.pipeline.device)
        return self.stopwatch

    def timings(self) -> list[Timing]:
        """Timings of the last step; empty unless :meth:`measure` was called before it."""
        return self.stopwatch.timings() if self.stopwatch is not None else []

    def run(self, batch: StepBatch, denominator: int) -> Tensor:
        """Run one step of this rank: all forwards and, where gradients are enabled, all backwards.

        Collective over all ranks. Gradients are being reduced when it returns; :meth:`finish` waits
        for them, and in training :meth:`read` for the ranks' exchange, so that no device is idle.

        The result is the summed loss of all ranks over ``denominator`` tokens, 0-dim float32
        (float64 in float64 runs), the same value on every rank.

        Raises:
            RuntimeError: naming the ranks and digests, if ranks hold different plans, or read
                different tokens from a store.
            ValueError: the plan has pipelines of its own that cannot be run.
        """
        training = torch.is_grad_enabled()
        PROGRESS.begin_step(batch)
        self._check_agreement(batch)
        runtime = self._runtime(batch.plan)
        pipeline = runtime.pipeline
        programs = pipeline.programs(batch.plan.replicas, batch.replica)
        if not training:
            programs = {
                place: [action for action in program if action.kind == FORWARD]
                for place, program in programs.items()
            }
        place, places = pipeline.rank.pipeline, pipeline.rank.mesh.pipeline
        messages = Messages(pipeline, receipts(programs, place, places, len(pipeline.stages)))
        step = Step(
            runtime.model,
            pipeline,
            replace(runtime.groups, chunks=self.chunks),
            batch,
            messages,
            denominator,
            self.stopwatch,
        )
        if self.stopwatch is not None:
            kernel = runtime.model.attention_kernel  # heterogeneous pipelines have their own
            if kernel is not None:
                kernel.timer = self.stopwatch
            self.stopwatch.begin_step()
        rows = enumerate(batch.micro_batches)
        shared = {number for number, each in rows if each.attention.replicas > 1}
        self.bucket_lifetimes = runtime.parameters
        with reducing_in(self.reduce_dtype), runtime.parameters.step(programs[place], shared):
            for action in programs[place]:
                PROGRESS.note(RUNNING, action)
                with runtime.parameters.action(action):
                    step.run(action)
            messages.finish()
        PROGRESS.note(EXCHANGING, "the exchange that ends it")
        loss = self._total_loss(step.loss, pipeline.rank, batch, denominator)
        PROGRESS.note(REDUCING, "its reduction" if training else "its end")
        if not training:
            self.read()
        return loss

    def finish(self) -> None:
        """Wait for the gradients of the last step and set ``.grad`` of the sharded parameters."""
        self.bucket_lifetimes.finish()

    def _runtime(self, plan: StepPlan) -> StepRuntime:
        if not plan.schemes:
            groups = self.groups.of_step(plan)
            return StepRuntime(self.model, self.pipeline, groups, self.parameters)
        if self.heterogeneous is None:
            raise ValueError(
                f"step {plan.step} is planned for pipelines of its own"
                f" ({'; '.join(map(str, plan.schemes))}), but the run has the mesh"
                f" {self.pipeline.rank.mesh} in every step. Plan without a strategy."
            )
        return self.heterogeneous(plan)

    def read(self) -> None:
        """Read what the ranks exchanged at the end of the last step, which waits for the device.

        Raises:
            RuntimeError: ranks hold different plans for the next step; ranks and digests are named.
        """
        assert self._told is not None, "a step has run"
        (batch, told), self._told = self._told, None
        losses, digests, notices, settings = told.T.tolist()
        check_digests(digests, f"step {batch.plan.step + 1}")
        self._agreed = batch.next_digest or None
        NOTICES.seen = reduce(or_, notices)
        mesh = self.pipeline.rank.mesh
        self.settings_agree = len(set(settings)) == 1 or mesh.pipeline == len(
            {(mesh.coordinate(rank).pipeline, each) for rank, each in enumerate(settings)}
        )
        self.losses = torch.tensor(losses, dtype=torch.int64).view(torch.float64).tolist()

    def _total_loss(self, loss: Tensor, rank: Rank, batch: StepBatch, denominator: int) -> Tensor:
        """Sum the loss over ranks; the same all-gather carries the rest of their exchange."""
        # The ranks of a tensor-parallel group compute the same loss: the first one's counts.
        mine = loss if rank.last_stage and rank.tensor == 0 else torch.zeros_like(loss)
        bits = mine.to(torch.float64).view(torch.int64)
        # By new_full, since a copy from the host would wait for the device.
        numbers = batch.next_digest, NOTICES.bits, self.settings
        others = [bits.new_full((), number) for number in numbers]
        told = gather_from_all_ranks(torch.stack([bits, *others]))
        self._told = batch, told
        total: Tensor = told[:, 0].contiguous().view(torch.float64).sum() / denominator
        return total.to(loss.dtype)

    def _check_agreement(self, batch: StepBatch) -> None:
        """Compare the ranks' plans and data, unless the last step's exchange covered this plan."""
        if self._agreed == batch.plan.digest and not batch.corpora:
            return
        # A sum and not xor, which is 0 if a mixture has the same store twice.
        digest = sum(each.digest for each in batch.corpora) % (1 << 63)
        mine = torch.tensor([batch.plan.digest, digest], device=self.pipeline.device)
        plans, samples = gather_from_all_ranks(mine).T.tolist()
        check_digests(plans, f"step {batch.plan.step}")
        if len(set(samples)) > 1:
            everyone = Ranks().every(lambda: batch.corpora)
            # A store may have another name on another rank.
            stores = [each.store for each in everyone[0]]
            whats = [f"The ranks read different tokens or masks from {each}" for each in stores]
            digests = ((f"digest {each.digest:016x}" for each in own) for own in everyone)
            differ = differences(dict(zip(whats, each, strict=True)) for each in digests)
            raise RuntimeError(
                f"{differ[0]} Every node must have the same documents, made with the same"
                " tokenizer: compare the files, and copy them again."
            )


@dataclass(eq=False, repr=False)
class Step:
    """One step on one rank: its open micro-batches, the cached keys of slices, and its loss."""

    model: Decoder
    pipeline: PipelineRank
    groups: ProcessGroups
    batch: StepBatch
    messages: Messages
    denominator: int
    stopwatch: Stopwatch | None = None  #: times every action; None: nothing is timed

    def __post_init__(self) -> None:
        self.cache = KeyValueCache()
        self.last_stage = len(self.pipeline.stages) - 1
        # The sum of this rank's token losses, in at least float32.
        wide = torch.float64 if self.pipeline.dtype == torch.float64 else torch.float32
        self.loss = torch.zeros((), dtype=wide, device=self.pipeline.device)
        # The input and the output of each stage's forward, until its backward.
        self.boundaries: dict[Action, tuple[Tensor | None, Tensor]] = {}

    def run(self, action: Action) -> None:
        """Run one action, with the receive before it and the send after it."""
        (self._forward if action.kind == FORWARD else self._backward)(action)

    def _forward(self, action: Action) -> None:
        micro_batch = self.batch.micro_batches[action.micro_batch]
        training = torch.is_grad_enabled()
        hidden = None
        if action.stage > 0:
            hidden = self.messages.receive(action, action.stage - 1, self._shape(micro_batch))
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
            gradient = self.messages.receive(action, action.stage + 1, self._shape(micro_batch))
        with self._timed(action):
            if output.requires_grad:  # False for a first stage with all parameters frozen
                torch.autograd.backward(output, gradient)
        self.cache.drop(action.micro_batch, self.pipeline.stages[action.stage])
        if hidden is not None:
            assert hidden.grad is not None
            self._send(action, action.stage - 1, hidden.grad, micro_batch)

    def _timed(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.stopwatch is None else self.stopwatch.action(action)

    def _shape(self, micro_batch: MicroBatchTensors) -> tuple[int, int]:
        return micro_batch.rows // self.pipeline.rank.mesh.tensor, self.pipeline.hidden_size

    def _send(
        self, action: Action, stage: int, tensor: Tensor, micro_batch: MicroBatchTensors
    ) -> None:
        tensor = tensor.contiguous()
        wanted = self._shape(micro_batch)
        assert tensor.shape == wanted, (action, tensor.shape, wanted)
        assert tensor.dtype == self.pipeline.dtype, (action, tensor.dtype, self.pipeline.dtype)
        self.messages.send(action, stage, tensor)


def check_digests(digests: list[int], what: str) -> None:
    """Raise RuntimeError if the digests of the ranks' plans for ``what``, in rank order, differ."""
    held = (f"digest {each:016x}" if each else "no such step" for each in digests)
    if differ := differences({f"The ranks hold different plans for {what}": each} for each in held):
        raise RuntimeError(
            f"{differ[0]} Every rank must see the same document lengths, seed and data settings:"
            " check that all nodes have the same data, software versions and arguments."
        )
