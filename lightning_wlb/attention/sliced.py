"""Attention where pieces are sliced over micro-batches.

The queries of a slice see the earlier slices' keys (:mod:`.sliced`) and their own. What they see
is put together in the order of the segments, from every rank of the context-parallel group, for
one kernel call. A single rank joins runs of consecutive rows, which is one copy, or none where
there are no earlier keys; a group gathers each rank's runs and picks from them by index. In
backward it is put together *again* instead of being kept: kept, the prefixes of a piece of n slices
would add up to n/2 times the piece, in every layer (:mod:`.refetch`). Where the layer itself
runs again in backward (``activation_checkpointing="full"``) that is not needed.

Gradients of keys are summed in float32 for half types, those of earlier keys where their owner's
backward finds them.

Every rank of the group runs the same collectives in forward and in backward, also one without any
query. Cost over whole pieces: that copy, once in forward and once in backward
(benchmarks/sliced_attention.py measures it); in a group one more gather in backward, and earlier
keys sent once per slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.context_parallel import added_up, gathered, summed, wide
from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata
from lightning_wlb.attention.process_groups import group_size
from lightning_wlb.attention.refetch import attend_reading_again
from lightning_wlb.attention.varlen import VarlenAttention
from lightning_wlb.sharding.slices import OWN


def sliced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    attention: VarlenAttention,
    group: ProcessGroup | None,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over their own and all earlier keys of their pieces.

    Args:
        q: [rows, heads, head_dim], local rows including padding.
        k: [rows, kv_heads, head_dim].
        v: [rows, kv_heads, head_dim].
        metadata: with ``slices`` that have a cache and a layer.
        attention: the kernel.
        group: the context-parallel group; None or a group of one rank without it.
        scale: factor of the scores, 1 / sqrt(head_dim) unless given.

    Returns:
        [rows, heads, head_dim], zero in padding rows.

    Raises:
        ValueError: if the metadata lacks the cache or the layer.
    """
    slices = metadata.slices
    if slices is None or slices.cache is None or slices.layer is None:
        raise ValueError(
            "a sliced micro-batch needs to know its layer and the step's cache: pass"
            " metadata.for_layer(number) to attention, as Transformer.forward does, and give the"
            " model micro_batch.with_cache(cache), as LanguageModule.step does."
        )

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return attention(q[: metadata.queries], keys, values, metadata, scale)

    if slices.cache.in_graph:
        if slices.keeps:
            slices.cache.put(slices.layer, slices.micro_batch, k, v)
        out = attend(*_joined(_parts(k, v, slices, slices.cache, slices.layer)))
    else:
        # Contiguous, lest a view of something larger is kept.
        own = k.detach().contiguous(), v.detach().contiguous()
        if slices.keeps:
            slices.cache.put(slices.layer, slices.micro_batch, *own)
        reader = _Reader(own, metadata, slices, slices.cache, slices.layer, group)
        keys, values = _read(k, v, reader)
        if reader.copies and torch.is_grad_enabled() and not metadata.recomputed:
            out = attend_reading_again(attend, keys, values, reader.read)
        else:
            # The graph would hold them until backward, which does not need them or makes its own.
            reader.own = None
            out = attend(keys, values)
    padding = metadata.rows - metadata.queries
    return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


def _parts(
    k: Tensor, v: Tensor, slices: SliceMetadata, cache: KeyValueCache, layer: int
) -> list[tuple[Tensor, Tensor]]:
    """Views of the keys and values that this rank puts one after another."""
    return [
        (k[run.start : run.stop], v[run.start : run.stop])
        if run.micro_batch == OWN
        else cache.read(layer, run)
        for run in slices.runs
    ]


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys), torch.cat(values)


class _Reader:
    """Puts together the keys and values that a micro-batch's segments read, in one layer."""

    def __init__(
        self,
        own: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        slices: SliceMetadata,
        cache: KeyValueCache,
        layer: int,
        group: ProcessGroup | None,
    ) -> None:
        self.own: tuple[Tensor, Tensor] | None = own
        self.shape = own[0].shape
        self.key_index = metadata.key_index
        self.slices = slices
        self.cache = cache
        self.layer = layer
        self.group = group
        self.size = group_size(group)

    @property
    def copies(self) -> bool:
        """Whether :meth:`read` gives more than views of this rank's own keys and values."""
        return self.size > 1 or len(self.slices.runs) > 1

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the order of the segments, [keys, kv_heads, head_dim] each."""
        assert self.own is not None
        parts = _parts(*self.own, self.slices, self.cache, self.layer)
        if self.size == 1:
            return _joined(parts)
        assert self.key_index is not None
        mine = parts[0][0].new_empty(self.slices.rows, 2, *self.shape[1:])
        filled = mine[: sum(len(keys) for keys, _ in parts)]
        for number, each in enumerate(zip(*parts, strict=True)):
            torch.cat(each, out=filled[:, number])
        both = gathered(mine, self.group).index_select(0, self.key_index)
        return both[:, 0], both[:, 1]

    def give_back(self, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
        """Send the gradients of what was read to their owners; this rank's own are returned."""
        dtype = wide(grad_keys.dtype)
        shares = grad_keys, grad_values
        if self.size > 1:
            assert self.key_index is not None
            rows = self.size * self.slices.rows
            total = added_up(rows, self.key_index, grad_keys, grad_values)
            mine = summed(total, self.group, dtype)
            shares = mine[:, 0], mine[:, 1]
        keys, values = self._from_later(grad_keys, dtype)
        at = 0
        for run in self.slices.runs:
            stop = at + run.stop - run.start
            key_share, value_share = shares[0][at:stop], shares[1][at:stop]
            if run.micro_batch == OWN:
                keys[run.start : run.stop] += key_share
                values[run.start : run.stop] += value_share
            else:
                self.cache.add_gradients(self.layer, run, key_share, value_share, dtype)
            at = stop
        return keys.to(grad_keys.dtype), values.to(grad_values.dtype)

    def _from_later(self, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's own keys and values that later slices have left; wide.

        The caller may add to them: nothing else reads them any more.
        """
        later = self.cache.gradients_of(self.layer, self.slices.micro_batch)
        if later is not None:
            return later
        return like.new_zeros(self.shape, dtype=dtype), like.new_zeros(self.shape, dtype=dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, reader: _Reader) -> tuple[Tensor, Tensor]:
        ctx.reader = reader
        return reader.read()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Any, ...]:
        return *ctx.reader.give_back(grad_keys, grad_values), None


_read: Callable[..., tuple[Tensor, Tensor]] = _Read.apply
