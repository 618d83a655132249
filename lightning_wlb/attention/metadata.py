"""What attention is told of the rows of a micro-batch: who sees which keys, and where they are.

Made by the data loader from index arithmetic (:mod:`lightning_wlb.sharding`), moved to the device
with the batch, and changed by nobody: a layer, or a step's cache of keys, gets a copy with its own
fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.sharding import RankIndices
from lightning_wlb.sharding.slices import Run, SlicedIndices


@dataclass(frozen=True)
class SliceMetadata:
    """What attention needs beyond :class:`AttentionMetadata` where pieces are sliced.

    Args:
        micro_batch: index in the replica's forward order.
        runs: rows whose keys this rank puts one after another.
        rows: of what it puts together, as every rank does; rows beyond the runs are read by none.
        keeps: whether other slices read this one's keys.
        cache: of the step; see ``MicroBatchTensors.with_cache``.
        layer: global number of the layer that is running; see ``AttentionMetadata.for_layer``.
    """

    micro_batch: int
    runs: tuple[Run, ...]
    rows: int
    keeps: bool
    cache: KeyValueCache | None = field(default=None, repr=False)
    layer: int | None = None

    @staticmethod
    def from_indices(indices: SlicedIndices, micro_batch: int) -> SliceMetadata:
        """From the index arithmetic."""
        return SliceMetadata(
            micro_batch=micro_batch, runs=indices.runs, rows=indices.rows, keeps=indices.keeps
        )


@dataclass(frozen=True)
class AttentionMetadata:
    """Attention segments of one rank's rows of a micro-batch; nobody changes it.

    Args:
        rows: local rows, padding included.
        queries: local rows that hold a token; rows from there on are padding.
        cu_seqlens_q: int32 [segments + 1], first query of each segment, then their number.
        cu_seqlens_k: int32 [segments + 1], first key of each segment, then their number.
        max_seqlen_q: most queries of a segment.
        max_seqlen_k: most keys of a segment.
        key_index: int64 [keys], in the order of ``cu_seqlens_k``, rows of the buffer that holds
            first the keys and values that arrive from other ranks and then the local rows; of
            slices, of what all ranks put together. None without context parallelism, where the
            keys are the local rows, or what a rank of slices puts together.
        gathered: first local rows that every rank sends to all; 0 where none are.
        send_index: int64 [sum of send_counts], local rows sent by all-to-all, by receiving rank;
            None where the all-to-all is not used.
        send_counts: rows sent to each rank by all-to-all.
        receive_counts: rows that arrive from each rank by all-to-all.
        head_rows: where heads and not keys are exchanged (:mod:`.ulysses`), rows of each
            rank that hold a token; the segments are then those of the whole micro-batch.
        replicas: data-parallel replicas whose context-parallel groups share the micro-batch.
        slices: what is needed beyond where pieces are sliced over micro-batches; None where the
            micro-batch's pieces are whole.
        sliding_window: keys that no query sees with this window are left out; None: none are.
        recomputed: whether the layer that is running runs again in backward; see
            :meth:`for_layer`.
    """

    rows: int
    queries: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: Tensor | None
    gathered: int = 0
    send_index: Tensor | None = None
    send_counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    head_rows: tuple[int, ...] = ()
    replicas: int = 1
    slices: SliceMetadata | None = None
    sliding_window: int | None = None
    recomputed: bool = False

    @property
    def keys(self) -> int:
        """Keys over all segments; known without asking the device."""
        if self.key_index is not None:
            return self.key_index.shape[0]
        return self.queries if self.slices is None else self.slices.rows

    def to(self, device: torch.device | str, non_blocking: bool = False) -> AttentionMetadata:
        """The same metadata with its tensors on ``device``."""
        moved: dict[str, Any] = {
            each.name: value.to(device, non_blocking=non_blocking)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), Tensor)
        }
        return replace(self, **moved)

    def for_layer(self, layer: int, recomputed: bool = False) -> AttentionMetadata:
        """The metadata for attention in one layer: a slice's earlier keys are that layer's.

        Args:
            layer: global number of the layer.
            recomputed: whether the layer runs again in backward.
        """
        slices = None if self.slices is None else replace(self.slices, layer=layer)
        return replace(self, slices=slices, recomputed=recomputed)

    @staticmethod
    def from_indices(
        indices: RankIndices,
        rows: int,
        context_parallel_size: int,
        sliding_window: int | None = None,
    ) -> AttentionMetadata:
        """Metadata on CPU from a sharding's index arithmetic; shares its memory.

        Args:
            indices: of one rank.
            rows: local rows including padding, the layout's ``rows``.
            context_parallel_size: ranks among which keys are gathered.
            sliding_window: what the indices were made for.
        """
        return AttentionMetadata(
            rows=rows,
            queries=len(indices.offset),
            cu_seqlens_q=torch.from_numpy(indices.cu_seqlens_q),
            cu_seqlens_k=torch.from_numpy(indices.cu_seqlens_k),
            max_seqlen_q=indices.max_seqlen_q,
            max_seqlen_k=indices.max_seqlen_k,
            key_index=(None if context_parallel_size == 1 else torch.from_numpy(indices.key_index)),
            gathered=indices.gathered,
            send_index=torch.from_numpy(indices.send_index) if indices.send_counts else None,
            send_counts=indices.send_counts,
            receive_counts=indices.receive_counts,
            head_rows=indices.head_rows,
            sliding_window=sliding_window,
        )
