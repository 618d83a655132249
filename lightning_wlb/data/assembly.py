"""From the plan of a step to the tensors of one rank.

:func:`make_step_batch` walks the micro-batches of this rank's replica, lays each over the
context-parallel group as the plan says (``sharding``), and reads from the store the
tokens that this rank's rows hold, and no others: tokens on the first pipeline stage, labels on
the last. All index arithmetic of attention happens here, in the data loader, off the training
path.

The label of a row is the next token of the same *store document*, also where a piece ends, so
that the number of targets does not depend on how documents were cut. Rows that pad a rank,
masked targets and the last token of a document have :data:`~lightning_wlb.data.batch.IGNORE`.

Cost: linear in the rank's own rows and in the keys they attend to, plus one read of the store
for each run of consecutive tokens (two for a document under context parallelism).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata
from lightning_wlb.data.batch import IGNORE, MicroBatchTensors, StepBatch
from lightning_wlb.data.documents import DocumentStore
from lightning_wlb.mesh import Rank
from lightning_wlb.plan import Slice, StepPlan
from lightning_wlb.prediction.executed import layout_of, units
from lightning_wlb.sharding import Layout, RankIndices, head_indices, rank_indices
from lightning_wlb.sharding.slices import SlicedIndices, SlicedReplica


def make_step_batch(
    plan: StepPlan,
    store: DocumentStore,
    at: Rank,
    state: dict[str, Any],
    next_digest: int,
    last: bool,
    sliding_window: int | None = None,
) -> StepBatch:
    """The tensors that the rank at ``at`` needs to run ``plan``.

    Args:
        plan: a valid plan for ``at.mesh.data`` replicas.
        store: where the documents are; read only for this rank's own rows.
        at: where this rank stands.
        state: the planner's state after this step.
        next_digest: digest of the following step's plan, 0 if there is none in this epoch.
        last: whether the run's bound on tokens is reached with this step.
        sliding_window: of the model's widest layer: keys that no query sees do not travel.

    Raises:
        ValueError: the plan is for another number of replicas.
    """
    if len(plan.replicas) != at.mesh.data:
        raise ValueError(
            f"step {plan.step} is planned for {len(plan.replicas)} replicas, but the mesh has"
            f" {at.mesh.data}. Plan for Mesh(data={at.mesh.data})."
        )
    sizes = at.mesh.context, at.mesh.tensor
    shares = any(len(group.replicas) > 1 for group in plan.replicas[at.data].forward)
    executed = tuple(
        units(each, *sizes) if shares or number == at.data else each
        for number, each in enumerate(plan.replicas)
    )
    replica = executed[at.data]
    members = [replica.slices_of(group) for group in replica.forward]
    layouts = [layout_of(replica, group, *sizes) for group in replica.forward]
    sliced = SlicedReplica(layouts, members, sliding_window)

    micro_batches = []
    for number, group in enumerate(replica.forward):
        slices, arrangement = members[number], layouts[number]
        assert arrangement.rows == group.rows, (
            f"the plan says {group.rows} rows, the sharding {arrangement.rows}"
        )
        # Merged replicas put their context-parallel groups one after another.
        rank = at.mesh.context * group.replicas.index(at.data) + at.context
        parts = sliced.indices(number, rank) if sliced.is_sliced(slices) else None
        micro_batches.append(
            _micro_batch(
                number,
                slices,
                arrangement,
                rank,
                parts,
                len(group.replicas),
                store,
                at,
                sliding_window,
            )
        )
    return StepBatch(plan, at.data, executed, micro_batches, state, next_digest, last)


def _micro_batch(
    number: int,
    slices: tuple[Slice, ...],
    arrangement: Layout,
    rank: int,
    parts: SlicedIndices | None,
    replicas: int,
    store: DocumentStore,
    at: Rank,
    sliding_window: int | None,
) -> MicroBatchTensors:
    rows = arrangement.rows
    if parts is not None:
        indices = parts.own
    elif arrangement.by_heads:
        # Which has all keys, whatever the window.
        indices, sliding_window = head_indices(arrangement, rank), None
    else:
        indices = rank_indices(arrangement, rank, sliding_window)
    offsets = indices.offset if parts is None else parts.positions
    attention = replace(
        AttentionMetadata.from_indices(indices, rows, arrangement.ranks, sliding_window),
        replicas=replicas,
        slices=None if parts is None else SliceMetadata.from_indices(parts, number),
    )
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
        attention=attention,
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
