"""The batch of one rank for one step: its plan, and the tensors of its micro-batches.

:func:`make_step_batch` spreads each micro-batch of this rank's replica over the context-parallel
group by the sharding that the plan names, and reads from the store only the tokens of this rank's
own rows: as tokens on the first pipeline stage, as labels on the last. All index arithmetic of
attention happens here, in the data loader, off the training path. The result, a
:class:`StepBatch`, is sent by value from a worker, pinned and moved to the device as a whole.

The label of a row is the next token of the same *store document*, even at the end of a piece, so
that the number of targets does not depend on how documents were cut. Padding rows, masked targets
and the last token of a document have the label :data:`IGNORE`.

Cost: linear in the rank's own rows and in the keys they attend to, plus one read of the store for
each run of consecutive tokens (two for a document under context parallelism).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata, with_tensors
from lightning_wlb.attention.recurrence import RecurrentRows, recurrent_rows
from lightning_wlb.data.store_checks import CorpusDigest, length_of, read_mask, read_tokens
from lightning_wlb.data.stores.document_store import DocumentStore
from lightning_wlb.mesh import Rank
from lightning_wlb.plan import Recompute, ReplicaPlan, Slice, StepPlan
from lightning_wlb.prediction.micro_batch import layout_of
from lightning_wlb.sharding import RankIndices, rank_indices
from lightning_wlb.sharding.sliced_indices import SlicedReplica

IGNORE = -100
"""Label of a row without a target (the default ``ignore_index`` of torch's cross-entropy)."""


@dataclass(frozen=True)
class MicroBatchTensors:
    """One micro-batch on one context-parallel rank of one replica; P = ``rows``."""

    tokens: Tensor | None  #: int64 [P], 0 in padding rows; None if the rank holds no embedding
    #: int64 [P], :data:`IGNORE` for rows without a target; None if the rank holds no head
    labels: Tensor | None
    positions: Tensor  #: int64 [P], from the piece's origin; 0 in padding rows
    attention: AttentionMetadata  #: which rows attend to which keys
    rows: int  #: P, rows of this rank, padding at the end included
    #: the part of every layer that backward recomputes, see ``MicroBatch.recompute``
    recompute: Recompute = "none"
    #: where the model's recurrences begin and continue; None if it has none
    recurrence: RecurrentRows | None = None

    def with_cache(self, cache: KeyValueCache) -> MicroBatchTensors:
        """A copy for the model: slices read earlier slices' keys from ``cache`` and add theirs."""
        slices = self.attention.slices
        if slices is None:
            return self
        attention = replace(self.attention, slices=replace(slices, cache=cache))
        recurrence = self.recurrence and replace(self.recurrence, states=cache.states)
        return replace(self, attention=attention, recurrence=recurrence)

    def changed(self, change: Callable[[Tensor], Tensor]) -> MicroBatchTensors:
        """A copy in which every tensor is changed, for example moved to a device."""
        recurrence = self.recurrence and with_tensors(self.recurrence, change)
        attention = with_tensors(self.attention, change)
        return replace(with_tensors(self, change), attention=attention, recurrence=recurrence)


class StepBatch:
    """Everything that one rank needs for one optimiser step.

    It is no dataclass, because Lightning rebuilds dataclasses in batches field by field.

    Args:
        plan: the step's plan for the whole mesh.
        replica: the data-parallel replica of this rank.
        micro_batches: this rank's micro-batches, in forward order.
        state: the planner's state after this step, plain Python, the same on every rank.
        next_digest: digest of the following step's plan; 0 if this step ends its epoch or run.
        last: whether the run reaches ``max_tokens`` with this step.
        wait_seconds: how long training was blocked until the loader yielded the batch.
        corpora: digests of the documents, in the first step of a pass over them.
    """

    def __init__(
        self,
        plan: StepPlan,
        replica: int,
        micro_batches: list[MicroBatchTensors],
        state: dict[str, Any],
        next_digest: int,
        last: bool,
        wait_seconds: float = 0.0,
        corpora: tuple[CorpusDigest, ...] = (),
    ) -> None:
        self.plan = plan
        self.replica = replica
        self.micro_batches = micro_batches
        self.state = state
        self.next_digest = next_digest
        self.last = last
        self.wait_seconds = wait_seconds
        self.corpora = corpora

    @property
    def own_plan(self) -> ReplicaPlan:
        """The plan of this rank's replica."""
        return self.plan.replicas[self.replica]

    @property
    def target_tokens(self) -> int:
        """Tokens with a target, over the whole mesh: the divisor of the step's loss."""
        return self.plan.target_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the step, over the whole mesh."""
        return self.plan.tokens

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> StepBatch:
        """A copy whose tensors are on ``device``.

        ``non_blocking`` (default on CUDA): the host continues while page-locked memory is copied.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type == "cuda"
        return self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> StepBatch:
        """A copy whose tensors are in page-locked host memory."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> StepBatch:
        changed = [each.changed(change) for each in self.micro_batches]
        return StepBatch(**{**vars(self), "micro_batches": changed})

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader worker would send every tensor as shared memory with an open file: some hundred
        # for a batch, while a process may have 1024 open files.
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


def make_step_batch(
    plan: StepPlan,
    store: DocumentStore,
    rank: Rank,
    state: dict[str, Any],
    next_digest: int,
    last: bool,
    sliding_window: int | None = None,
    vocab_size: int | None = None,
    recurrent: bool = False,
) -> StepBatch:
    """The tensors that a rank needs to run ``plan``.

    Args:
        plan: a valid plan for ``rank.mesh.data`` replicas.
        store: holds the documents; only this rank's own rows are read.
        rank: the place of this rank in the mesh.
        state, next_digest, last: as in :class:`StepBatch`.
        sliding_window: the model's widest window: keys that no query sees are not sent.
        vocab_size: the model's vocabulary; None: not known.
        recurrent: whether layers of the model carry a state from row to row.

    Raises:
        ValueError: the plan is for another number of replicas, a token is outside the vocabulary,
            or the store fails or returns other data than it announced.
    """
    mesh = rank.mesh
    if len(plan.replicas) != mesh.data:
        raise ValueError(
            f"step {plan.step} is planned for {len(plan.replicas)} replicas, but the mesh has"
            f" {mesh.data}. Plan for Mesh(data={mesh.data})."
        )
    sizes = mesh.context, mesh.tensor
    own = plan.replicas[rank.data]
    members = [own.slices_of(each) for each in own.forward]
    layouts = [layout_of(own, each, *sizes) for each in own.forward]
    sliced = SlicedReplica(layouts, members, sliding_window)
    ends = (
        {(each.document, each.origin): each.stop for each in sorted(own.slices)}
        if recurrent
        else {}
    )

    micro_batches = []
    for number, (micro_batch, slices, layout) in enumerate(
        zip(own.forward, members, layouts, strict=True)
    ):
        assert layout.rows == micro_batch.rows, (
            f"the plan says {micro_batch.rows} rows, the sharding {layout.rows}"
        )
        # The context-parallel groups of merged replicas follow one another.
        sharers = len(micro_batch.replicas)
        place = mesh.context * micro_batch.replicas.index(rank.data) + rank.context
        if sliced.is_sliced(slices):
            parts = sliced.indices(number, place)
            indices, offsets = parts.own, parts.positions
            of_slices = SliceMetadata(number, parts.runs, parts.rows, parts.keeps)
        else:
            indices, of_slices = rank_indices(layout, place, sliding_window), None
            offsets = indices.offset
        attention = AttentionMetadata.from_indices(
            indices, layout.rows, layout.ranks, sliding_window
        )
        positions = np.zeros(layout.rows, np.int64)
        positions[: len(offsets)] = offsets
        tokens, labels = _read(slices, indices, layout.rows, store, rank, vocab_size)
        micro_batches.append(
            MicroBatchTensors(
                tokens=None if tokens is None else torch.from_numpy(tokens),
                labels=None if labels is None else torch.from_numpy(labels),
                positions=torch.from_numpy(positions),
                attention=replace(attention, slices=of_slices, replicas=sharers),
                rows=layout.rows,
                recompute=micro_batch.recompute,
                recurrence=recurrent_rows(layout, slices, ends, sharers) if recurrent else None,
            )
        )
    return StepBatch(plan, rank.data, micro_batches, state, next_digest, last)


def _read(
    slices: tuple[Slice, ...],
    indices: RankIndices,
    rows: int,
    store: DocumentStore,
    rank: Rank,
    vocab_size: int | None,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Tokens and labels of the rank's rows, one read for each run of consecutive tokens."""
    tokens = np.zeros(rows, np.int64) if rank.first_stage else None
    labels = np.full(rows, IGNORE, np.int64) if rank.last_stage else None
    if tokens is None and labels is None:
        return None, None
    count = len(indices.offset)
    breaks = (np.diff(indices.document) != 0) | (np.diff(indices.offset) != 1)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), count] if count else [0]
    for row, end in pairwise(bounds):
        part = slices[int(indices.document[row])]
        start = part.start + int(indices.offset[row])
        stop = start + end - row
        # One token more than the rows, for the last row's label, unless the document ends there.
        label_stop = min(stop + 1, length_of(store, part.document))
        first = start if tokens is not None else start + 1
        until = label_stop if labels is not None else stop
        if until <= first:
            continue
        read = read_tokens(store, part.document, first, until, vocab_size)
        if tokens is not None:
            tokens[row:end] = read[: stop - start]
        if labels is not None:
            following = read[start + 1 - first :]
            if len(following):
                allowed = read_mask(store, part.document, start + 1, label_stop)
                if allowed is not None:
                    following = np.where(allowed, following, IGNORE)
                labels[row : row + len(following)] = following
    return tokens, labels
