"""Which keys the rows of a micro-batch see, and where these keys are.

The data loader makes the metadata by index arithmetic (:mod:`lightning_wlb.sharding`), and moves it
to the device with the batch. Nobody changes it: layers, and steps with a cache of keys, get copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.sharding import RankIndices
from lightning_wlb.sharding.sliced_indices import Run

_Holder = TypeVar("_Holder", bound=Any)  # a dataclass


def with_tensors(holder: _Holder, change: Callable[[Tensor], Tensor]) -> _Holder:
    """A copy of a dataclass in which ``change`` has been applied to every tensor."""
    tensors: dict[str, Any] = {
        field.name: change(value)
        for field in fields(holder)
        if isinstance(value := getattr(holder, field.name), Tensor)
    }
    return replace(holder, **tensors)


@dataclass(frozen=True)
class SliceMetadata:
    """What attention needs besides :class:`AttentionMetadata` if pieces are sliced."""

    micro_batch: int  #: index in the replica's forward order
    runs: tuple[Run, ...]  #: see :class:`~lightning_wlb.sharding.sliced_indices.SlicedIndices`
    rows: int  #: see there
    keeps: bool  #: see there
    #: the step's cache, which ``MicroBatchTensors.with_cache`` fills in
    cache: KeyValueCache | None = field(default=None, repr=False)
    #: global number of the running layer, which ``AttentionMetadata.for_layer`` fills in
    layer: int | None = None

    @property
    def cache_and_layer(self) -> tuple[KeyValueCache, int]:
        """The step's cache and the layer's number; ValueError if either is not filled in."""
        if self.cache is None or self.layer is None:
            raise ValueError(
                "a sliced micro-batch needs to know its layer and the step's cache: pass"
                " metadata.for_layer(number) to attention, as Transformer.forward does, and give"
                " the model micro_batch.with_cache(cache), as LanguageModule.step does."
            )
        return self.cache, self.layer


@dataclass(frozen=True)
class AttentionMetadata:
    """Attention segments of one rank's rows of a micro-batch.

    The fields from ``cu_seqlens_q`` to ``receive_counts`` are those of
    :class:`~lightning_wlb.sharding.rank_indices.RankIndices`, as tensors. ``send_index`` is None
    without an all-to-all. ``key_index`` is an index into the rows of the buffer, or for slices into
    the gathered ``runs``. Without context parallelism it is None: keys are local rows or ``runs``.
    """

    rows: int  #: local rows, padding included
    queries: int  #: local rows that hold a token; later rows are padding
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: Tensor | None
    gathered: int = 0
    send_index: Tensor | None = None
    send_counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    replicas: int = 1  #: data-parallel replicas whose context-parallel groups share the micro-batch
    slices: SliceMetadata | None = None  #: None if the micro-batch's pieces are whole
    #: the window of the indices, which leave out keys that no query sees with it
    sliding_window: int | None = None
    recomputed: bool = False  #: whether backward recomputes the layer that is running

    @property
    def keys(self) -> int:
        """Number of keys over all segments, known without waiting for the device."""
        if self.key_index is not None:
            return self.key_index.shape[0]
        return self.queries if self.slices is None else self.slices.rows

    def to(self, device: torch.device | str) -> AttentionMetadata:
        """The same metadata with its tensors on ``device``."""
        return with_tensors(self, lambda tensor: tensor.to(device))

    def for_layer(self, layer: int, recomputed: bool = False) -> AttentionMetadata:
        """The metadata for attention in one layer, by its global number.

        ``recomputed`` says whether backward recomputes the layer.
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
        """Metadata on CPU from one rank's indices, with which it shares memory.

        ``rows`` and the number of ranks are the layout's, the window is the indices'.
        """
        named = {each.name: getattr(indices, each.name) for each in fields(indices)}
        kept = named.keys() & {each.name for each in fields(AttentionMetadata)}
        arrays: dict[str, Any] = {
            name: torch.from_numpy(value) if isinstance(value := named[name], np.ndarray) else value
            for name in kept
        }
        if context_parallel_size == 1:
            arrays["key_index"] = None
        if not indices.send_counts:
            arrays["send_index"] = None
        queries = len(indices.offset)
        return AttentionMetadata(rows, queries, **arrays, sliding_window=sliding_window)
