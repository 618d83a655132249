"""Attention where pieces are sliced over micro-batches.

The queries of a slice see the earlier slices' keys (:mod:`.kv_cache`) and their own. What they see
is put together in the order of the segments, from every rank of the context-parallel group, for
one kernel call. In backward it is put together *again* instead of being kept: kept, the prefixes
of a piece of n slices would add up to n/2 times the piece, in every layer (:mod:`.read_again`).
Where the layer itself runs again in backward (``activation_checkpointing="full"``) that is not
needed.

Every rank of the group runs the same collectives in forward and in backward, also one without any
query. Cost over whole pieces: one more gather in backward, and earlier keys sent once per slice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.context_parallel import gathered, summed, wide
from lightning_wlb.attention.kv_cache import KeyValueCache, SliceMetadata
from lightning_wlb.attention.read_again import attend_reading_again
from lightning_wlb.attention.varlen import AttentionMetadata, VarlenAttention


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
        metadata: with ``slices``, whose ``cache`` and ``layer`` are set.
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
            " metadata.for_layer(number) to attention, as Transformer.forward does, and run the"
            " step by LanguageModule.step."
        )

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return attention(q[: metadata.queries], keys, values, metadata, scale)

    both = torch.stack((k, v), dim=1)
    if slices.cache.in_graph:
        keys, values = _in_graph(both, metadata, slices, slices.cache, slices.layer)
        out = attend(keys, values)
    else:
        if slices.keeps:
            both = _keep(both, slices, slices.cache, slices.layer)
        reader = _Reader(both.detach(), metadata, slices, slices.cache, slices.layer, group)
        keys, values = _read(both, reader)
        if torch.is_grad_enabled() and not metadata.recomputed:
            out = attend_reading_again(attend, keys, values, reader.read)
        else:
            # The graph would hold them until backward, which makes its own.
            reader.own = None
            out = attend(keys, values)
    padding = metadata.rows - metadata.queries
    return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


def _in_graph(
    both: Tensor,
    metadata: AttentionMetadata,
    slices: SliceMetadata,
    cache: KeyValueCache,
    layer: int,
) -> tuple[Tensor, Tensor]:
    assert metadata.key_index is not None
    if slices.keeps:
        cache.put(layer, slices.micro_batch, both)
    past = [cache.read(layer, source, rows) for source, rows in slices.past]
    read = torch.cat((*past, both)).index_select(0, metadata.key_index)
    return read[:, 0].contiguous(), read[:, 1].contiguous()


class _Reader:
    """Puts together the keys and values that a micro-batch's segments read, in one layer."""

    def __init__(
        self,
        own: Tensor,
        metadata: AttentionMetadata,
        slices: SliceMetadata,
        cache: KeyValueCache,
        layer: int,
        group: ProcessGroup | None,
    ) -> None:
        assert metadata.key_index is not None
        self.own: Tensor | None = own
        self.shape = own.shape
        self.key_index = metadata.key_index
        self.slices = slices
        self.cache = cache
        self.layer = layer
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the order of the segments, [keys, kv_heads, head_dim] each."""
        assert self.own is not None
        past = [self.cache.read(self.layer, source, rows) for source, rows in self.slices.past]
        missing = self.slices.past_rows - sum(map(len, past))
        padding = self.own.new_zeros(missing, *self.own.shape[1:])
        mine = torch.cat((*past, padding, self.own))
        if self.size > 1:
            mine = gathered(mine, self.group)
        read = mine.index_select(0, self.key_index)
        return read[:, 0].contiguous(), read[:, 1].contiguous()

    def give_back(self, grad_keys: Tensor, grad_values: Tensor) -> Tensor:
        """Send the gradients of what was read to their owners; this rank's own are returned."""
        stride = self.slices.past_rows + self.shape[0]
        dtype = wide(grad_keys.dtype)
        total = grad_keys.new_zeros(self.size * stride, *self.shape[1:], dtype=dtype)
        total[:, 0].index_add_(0, self.key_index, grad_keys.to(dtype))
        total[:, 1].index_add_(0, self.key_index, grad_values.to(dtype))
        if self.size > 1:
            total = summed(total, self.group, dtype)
        at = 0
        for source, rows in self.slices.past:
            self.cache.add_gradient(self.layer, source, rows, total[at : at + len(rows)])
            at += len(rows)
        return total[self.slices.past_rows :].to(grad_keys.dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, reader: _Reader) -> tuple[Tensor, Tensor]:
        ctx.reader = reader
        return reader.read()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Any, ...]:
        return ctx.reader.give_back(grad_keys, grad_values), None


class _Keep(torch.autograd.Function):
    """Leaves keys and values in the cache; backward adds the gradients that came back to them.

    Where forward runs again the cache has them already.
    """

    @staticmethod
    def forward(
        ctx: Any, both: Tensor, slices: SliceMetadata, cache: KeyValueCache, layer: int
    ) -> Tensor:
        ctx.place = slices, cache, layer
        if slices.homes is None:
            cache.put(layer, slices.micro_batch, both.detach())
        return both.view_as(both)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        slices, cache, layer = ctx.place
        if slices.homes is None:
            later = cache.gradient(layer, slices.micro_batch)
            total = gradient if later is None else gradient.to(later.dtype) + later
        else:
            total = gradient.to(wide(gradient.dtype), copy=True)
            for home in slices.homes:
                later = cache.gradient(layer, home.micro_batch)
                if later is not None:
                    total.index_add_(0, home.here, later.index_select(0, home.there))
        return total.to(gradient.dtype), None, None, None


# torch leaves Function.apply untyped.
_read: Any = _Read.apply
_keep: Any = _Keep.apply
