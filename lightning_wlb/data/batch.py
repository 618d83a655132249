"""What one rank is given for one step: its plan, and the tensors of its micro-batches.

:class:`StepBatch` is what the loader hands to ``training_step``: made by
:func:`~lightning_wlb.data.collate.make_step_batch`, sent by value from a loader worker, pinned
and moved to the device as a whole.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.data.corpus_digest import Sample
from lightning_wlb.plan import Recompute, ReplicaPlan, StepPlan

IGNORE = -100
"""Label of a row without a target (the default ``ignore_index`` of torch's cross-entropy)."""

_Fields = TypeVar("_Fields", "MicroBatchTensors", AttentionMetadata)


@dataclass(frozen=True)
class MicroBatchTensors:
    """One micro-batch on one context-parallel rank of one replica; P = ``rows``.

    Args:
        tokens: int64 [P], 0 in padding rows; None where the rank holds no embedding.
        labels: int64 [P], :data:`IGNORE` where there is no target; None where the rank holds
            no head.
        positions: int64 [P], from the piece's origin; 0 in padding rows.
        attention: which rows attend to which keys.
        rows: P, rows of this rank, padding at the end included.
        recompute: what backward computes again of every layer, see ``MicroBatch.recompute``.
    """

    tokens: Tensor | None
    labels: Tensor | None
    positions: Tensor
    attention: AttentionMetadata
    rows: int
    recompute: Recompute = "none"

    def with_cache(self, cache: KeyValueCache) -> MicroBatchTensors:
        """What the model is given: slices read earlier keys from the step's cache, and add own."""
        slices = self.attention.slices
        if slices is None:
            return self
        attention = replace(self.attention, slices=replace(slices, cache=cache))
        return replace(self, attention=attention)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatchTensors:
        """A copy on ``device``."""
        moved = _with_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return replace(moved, attention=self.attention.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatchTensors:
        """A copy in page-locked host memory."""
        pinned = _with_tensors(self, Tensor.pin_memory)
        return replace(pinned, attention=_with_tensors(self.attention, Tensor.pin_memory))


class StepBatch:
    """Everything that one rank needs for one optimiser step.

    Not a dataclass: Lightning rebuilds dataclasses in batches field by field.

    Args:
        plan: the step's plan, of the whole mesh.
        replica: the data-parallel replica of this rank.
        executed: the replicas' plans as they are executed
            (:mod:`lightning_wlb.prediction.asymmetric_units`), which differ from the plan's own
            where these are asymmetric. Replicas that share no micro-batch with this one may be left
            as planned.
        micro_batches: in the order of ``units.forward``.
        state: the planner's state after this step, plain Python, the same on every rank.
        next_digest: digest of the following step's plan; 0 if this step ends its epoch or run.
        last: whether the run's bound on tokens is reached with this step.
        wait_seconds: how long training was blocked until the loader handed the batch over.
        samples: of the documents, with the first step of a pass over them.
    """

    def __init__(
        self,
        plan: StepPlan,
        replica: int,
        executed: tuple[ReplicaPlan, ...],
        micro_batches: list[MicroBatchTensors],
        state: dict[str, Any],
        next_digest: int,
        last: bool,
        wait_seconds: float = 0.0,
        samples: tuple[Sample, ...] = (),
    ) -> None:
        self.plan = plan
        self.replica = replica
        self.executed = executed
        self.micro_batches = micro_batches
        self.state = state
        self.next_digest = next_digest
        self.last = last
        self.wait_seconds = wait_seconds
        self.samples = samples

    @property
    def units(self) -> ReplicaPlan:
        """The plan of this rank's replica as it is executed."""
        return self.executed[self.replica]

    @property
    def target_tokens(self) -> int:
        """Tokens with a target, over the whole mesh: what the step's loss is divided by."""
        return self.plan.target_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the step, over the whole mesh."""
        return self.plan.tokens

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> StepBatch:
        """A copy whose tensors are on ``device``.

        With ``non_blocking`` the host goes on while the copies run, as it can from page-locked
        memory. None, as Lightning leaves it out, means so where the device is a CUDA GPU.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type == "cuda"
        return self._with(lambda each: each.to(device, non_blocking))

    def pin_memory(self) -> StepBatch:
        """A copy whose tensors are in page-locked host memory."""
        return self._with(MicroBatchTensors.pin_memory)

    def _with(self, change: Callable[[MicroBatchTensors], MicroBatchTensors]) -> StepBatch:
        return StepBatch(**{**vars(self), "micro_batches": list(map(change, self.micro_batches))})

    def __reduce__(self) -> tuple[Any, ...]:
        # From a loader worker torch would send every tensor as shared memory, each with an open
        # file: some hundred for a batch, and a process may have 1024.
        buffer = io.BytesIO()
        _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(vars(self))
        return _from_values, (buffer.getvalue(),)

    def __repr__(self) -> str:
        rows = [each.rows for each in self.micro_batches]
        return (
            f"StepBatch(step {self.plan.step}, epoch {self.plan.epoch}, replica {self.replica} of"
            f" {len(self.plan.replicas)}: micro-batches of {rows} rows; the step has {self.tokens}"
            f" tokens, {self.target_tokens} targets, {len(self.plan.pieces)} pieces"
            f"{', last' if self.last else ''})"
        )


class _ByValue(pickle.Pickler):
    """Pickles tensors of the CPU by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _from_values(data: bytes) -> StepBatch:
    return StepBatch(**pickle.loads(data))


def _with_tensors(holder: _Fields, change: Callable[[Tensor], Tensor]) -> _Fields:
    """A copy of the dataclass with every field that is a tensor changed."""
    tensors: dict[str, Any] = {
        field.name: change(value)
        for field in fields(holder)
        if isinstance(value := getattr(holder, field.name), Tensor)
    }
    return replace(holder, **tensors)
