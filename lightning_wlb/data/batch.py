"""From the plan of a step to the tensors of one rank.

:func:`make_step_batch` walks the micro-batches of this rank's replica, lays each over the
context-parallel group as the plan says (``attention.sharding``), and reads from the store the
tokens that this rank's rows hold, and no others: tokens on the first pipeline stage, labels on
the last. All index arithmetic of attention happens here, in the data loader, off the training
path.

The label of a row is the next token of the same *store document*, also where a piece ends, so
that the number of targets does not depend on how documents were cut. Rows that pad a rank,
masked targets and the last token of a document have :data:`IGNORE`.

Cost: linear in the rank's own rows and in the keys they attend to, plus one read of the store
for each run of consecutive tokens (two for a document under context parallelism).
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_wlb.attention.kv_cache import KeyValueCache, SliceMetadata
from lightning_wlb.attention.sharding import Layout, RankIndices, layout, rank_indices
from lightning_wlb.attention.slices import SlicedReplica
from lightning_wlb.attention.varlen import AttentionMetadata
from lightning_wlb.data.documents import DocumentStore
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning.units import units

IGNORE = -100
"""Label of a row without a target (the default ``ignore_index`` of torch's cross-entropy)."""

_Fields = TypeVar("_Fields", "MicroBatchTensors", AttentionMetadata)


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the mesh, as far as its data is concerned.

    Tensor-parallel ranks get the same batch; pipeline ranks differ only in whether they need
    tokens and labels.

    Args:
        replica: data-parallel replica, in ``[0, replicas)``.
        context_rank: rank in the context-parallel group, in ``[0, context_parallel_size)``.
        context_parallel_size: ranks that share a micro-batch's tokens.
        tensor_parallel_size: every rank's rows are padded to a multiple of it.
        replicas: number of data-parallel replicas.
        first_stage: whether the rank holds the embedding and needs tokens.
        last_stage: whether the rank holds the head and needs labels.
        pipeline_parallel_size: ranks of the pipeline, which micro-batches are planned for.
        stages_per_rank: virtual stages of each of them.

    Raises:
        ValueError: a rank outside its group.
    """

    replica: int = 0
    context_rank: int = 0
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    replicas: int = 1
    first_stage: bool = True
    last_stage: bool = True
    pipeline_parallel_size: int = 1
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("replica", self.replica, self.replicas),
            ("context_rank", self.context_rank, self.context_parallel_size),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"{name}={rank} is not in [0, {size}): check {self}.")


@dataclass
class MicroBatchTensors:
    """One micro-batch on one context-parallel rank of one replica; P = ``rows``.

    Args:
        tokens: int64 [P], 0 in padding rows; None where the rank holds no embedding.
        labels: int64 [P], :data:`IGNORE` where there is no target; None where the rank holds
            no head.
        positions: int64 [P], from the piece's origin; 0 in padding rows.
        attention: which rows attend to which keys.
        rows: P, rows of this rank, padding at the end included.
    """

    tokens: Tensor | None
    labels: Tensor | None
    positions: Tensor
    attention: AttentionMetadata
    rows: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatchTensors:
        """A copy on ``device``."""
        return replace(
            self,
            tokens=_moved(self.tokens, device, non_blocking),
            labels=_moved(self.labels, device, non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            attention=self.attention.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> MicroBatchTensors:
        """A copy in page-locked host memory."""
        pinned = _pinned(self)
        return replace(pinned, attention=_pinned(self.attention))


class StepBatch:
    """Everything that one rank needs for one optimiser step.

    Not a dataclass: Lightning rebuilds dataclasses in batches field by field.

    Args:
        plan: the step's plan, of the whole mesh.
        replica: the data-parallel replica of this rank.
        units: the replica's plan as it is executed (``planning.units``): the plan itself, unless
            it is asymmetric.
        micro_batches: in the order of ``units.forward``.
        state: the planner's state after this step, plain Python, the same on every rank.
        next_digest: digest of the following step's plan; 0 if this step ends its epoch or run.
        last: whether the run's bound on tokens is reached with this step.
        wait_seconds: how long training was blocked until the loader handed the batch over.
    """

    def __init__(
        self,
        plan: StepPlan,
        replica: int,
        units: ReplicaPlan,
        micro_batches: list[MicroBatchTensors],
        state: dict[str, Any],
        next_digest: int,
        last: bool,
        wait_seconds: float = 0.0,
    ) -> None:
        self.plan = plan
        self.replica = replica
        self.units = units
        self.micro_batches = micro_batches
        self.state = state
        self.next_digest = next_digest
        self.last = last
        self.wait_seconds = wait_seconds

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

        Args:
            device: to copy to.
            non_blocking: whether the host goes on while the copies run, as it can from page-locked
                memory; None: where the device is a CUDA GPU. Lightning leaves it out.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type == "cuda"
        return self._with([each.to(device, non_blocking) for each in self.micro_batches])

    def pin_memory(self) -> StepBatch:
        """A copy whose tensors are in page-locked host memory."""
        return self._with([each.pin_memory() for each in self.micro_batches])

    def share_keys(self, cache: KeyValueCache) -> None:
        """Give the micro-batches whose pieces are sliced the cache of the step that runs them."""
        for micro_batch in self.micro_batches:
            if micro_batch.attention.slices is not None:
                micro_batch.attention.slices.cache = cache

    def _with(self, micro_batches: list[MicroBatchTensors]) -> StepBatch:
        return StepBatch(
            self.plan,
            self.replica,
            self.units,
            micro_batches,
            self.state,
            self.next_digest,
            self.last,
            self.wait_seconds,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # From a loader worker torch would send every tensor as shared memory, each with an open
        # file: some hundred for a batch, and a process may have 1024.
        buffer = io.BytesIO()
        _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(self.__dict__)
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
    batch = StepBatch.__new__(StepBatch)
    batch.__dict__.update(pickle.loads(data))
    return batch


def make_step_batch(
    plan: StepPlan,
    store: DocumentStore,
    at: Coordinates,
    state: dict[str, Any],
    next_digest: int,
    last: bool,
) -> StepBatch:
    """The tensors that the rank at ``at`` needs to run ``plan``.

    Args:
        plan: a valid plan for ``at.replicas`` replicas.
        store: where the documents are; read only for this rank's own rows.
        at: this rank's place.
        state: the planner's state after this step.
        next_digest: digest of the following step's plan, 0 if there is none in this epoch.
        last: whether the run's bound on tokens is reached with this step.

    Raises:
        ValueError: the plan is for another number of replicas.
    """
    if len(plan.replicas) != at.replicas:
        raise ValueError(
            f"step {plan.step} is planned for {len(plan.replicas)} replicas, but the mesh has"
            f" {at.replicas}. Plan with MeshSettings(replicas={at.replicas})."
        )
    replica = units(plan.replicas[at.replica], at.context_parallel_size, at.tensor_parallel_size)
    members = [replica.slices_of(group) for group in replica.forward]
    layouts = [
        _layout(group, slices, at) for group, slices in zip(replica.forward, members, strict=True)
    ]
    sliced = SlicedReplica(layouts, members)
    micro_batches = [
        _micro_batch(index, group.replicas, members[index], layouts[index], sliced, store, at)
        for index, group in enumerate(replica.forward)
    ]
    return StepBatch(plan, at.replica, replica, micro_batches, state, next_digest, last)


def _layout(group: MicroBatch, slices: tuple[Slice, ...], at: Coordinates) -> Layout:
    arrangement = layout(
        group.sharding,
        [part.tokens for part in slices],
        at.context_parallel_size * len(group.replicas),
        at.tensor_parallel_size,
    )
    assert arrangement.rows == group.rows, (
        f"the plan says {group.rows} rows, the sharding {arrangement.rows}"
    )
    return arrangement


def _micro_batch(
    number: int,
    replicas: tuple[int, ...],
    slices: tuple[Slice, ...],
    arrangement: Layout,
    sliced: SlicedReplica,
    store: DocumentStore,
    at: Coordinates,
) -> MicroBatchTensors:
    rows = arrangement.rows
    # Merged replicas put their context-parallel groups one after another.
    ranks = at.context_parallel_size * len(replicas)
    rank = at.context_parallel_size * replicas.index(at.replica) + at.context_rank
    if sliced.is_sliced(number):
        parts = sliced.indices(number, rank)
        indices, offsets = parts.own, parts.positions
        # With earlier keys in front, the keys are never just the local rows.
        attention = replace(
            AttentionMetadata.from_indices(indices, rows, ranks),
            key_index=torch.from_numpy(indices.key_index),
            slices=SliceMetadata.from_indices(parts, number),
        )
    else:
        indices = rank_indices(arrangement, rank)
        offsets = indices.offset
        attention = AttentionMetadata.from_indices(indices, rows, ranks)
    positions = np.zeros(rows, np.int64)
    positions[: len(offsets)] = offsets
    tokens = np.zeros(rows, np.int64) if at.first_stage else None
    labels = np.full(rows, IGNORE, np.int64) if at.last_stage else None
    if tokens is not None or labels is not None:
        _read(slices, indices, store, tokens, labels)
    return MicroBatchTensors(
        tokens=None if tokens is None else torch.from_numpy(tokens),
        labels=None if labels is None else torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        attention=replace(attention, replicas=len(replicas)),
        rows=rows,
    )


def _read(
    slices: tuple[Slice, ...],
    indices: RankIndices,
    store: DocumentStore,
    tokens: np.ndarray | None,
    labels: np.ndarray | None,
) -> None:
    """Fill the rank's real rows, one read for each run of consecutive tokens."""
    count = len(indices.offset)
    breaks = (np.diff(indices.document) != 0) | (np.diff(indices.offset) != 1)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), count] if count else [0]
    for row, end in pairwise(bounds):
        part = slices[int(indices.document[row])]
        start = part.start + int(indices.offset[row])
        stop = start + end - row
        # One token more than the rows, for the last row's label, where the document has it.
        label_stop = min(stop + 1, int(store.lengths[part.document]))
        first = start if tokens is not None else start + 1
        until = label_stop if labels is not None else stop
        if until <= first:
            continue
        read = np.asarray(store.read(part.document, first, until), np.int64)
        if tokens is not None:
            tokens[row:end] = read[: stop - start]
        if labels is not None:
            following = read[start + 1 - first :]
            allowed = store.mask(part.document, start + 1, label_stop)
            if allowed is not None:
                following = np.where(allowed, following, IGNORE)
            labels[row : row + len(following)] = following


def _moved(x: Tensor | None, device: torch.device | str, non_blocking: bool) -> Tensor | None:
    return None if x is None else x.to(device, non_blocking=non_blocking)


def _pinned(holder: _Fields) -> _Fields:
    """The dataclass with its tensor fields in page-locked memory."""
    tensors: dict[str, Any] = {
        field.name: value.pin_memory()
        for field in fields(holder)
        if isinstance(value := getattr(holder, field.name), Tensor | SliceMetadata)
    }
    return replace(holder, **tensors)
