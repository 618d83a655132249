"""Attention where pieces are sliced over micro-batches.

The queries of a slice see their own keys and those of the piece's earlier slices, which are in the
step's :mod:`.kv_cache`. All are put in the order of the segments for one kernel call
(:mod:`lightning_wlb.sharding.sliced_indices`). A single rank joins runs of consecutive rows, which
is one copy, or none where there are no earlier keys. A group gathers each rank's runs and picks
from them by index.

Backward refetches the keys instead of keeping them: the prefixes of a piece of n slices would add
up to n/2 times the piece, in every layer. Gradients of keys are summed in float32 for half types;
those of earlier keys are left in the cache for their owner's backward.

Every rank of the group runs the same collectives in forward and in backward, also one without any
query. Cost over whole pieces: that copy, once in forward and once in backward; in a group one more
gather in backward, and earlier keys sent once per slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.kv_cache import KeyValueCache, attend_with_refetch
from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata
from lightning_wlb.distributed.collectives import (
    all_gather,
    padded,
    reduce_dtype,
    reduce_scatter,
    sum_dtype,
    summed_by_row,
)
from lightning_wlb.distributed.process_groups import group_size
from lightning_wlb.sharding.sliced_indices import OWN


def sliced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    attention: VarlenAttention,
    group: ProcessGroup | None,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention of this rank's queries over their own and all earlier keys of their pieces.

    The arguments are those of :func:`.context_parallel_attention`, with the queries ``q``, [rows,
    heads, head_dim], themselves; ``metadata`` has ``slices`` with a cache and a layer.

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
        return attention(q[: metadata.queries], keys, values, metadata, options)

    cache = slices.cache
    # Contiguous, lest a view of something larger is kept.
    own = (k, v) if cache.in_graph else (k.detach().contiguous(), v.detach().contiguous())
    if slices.keeps:
        cache.put(slices.layer, slices.micro_batch, *own)
    reader = _KeyReader(slices, cache, slices.layer, metadata.key_index, group)
    if cache.in_graph:
        out = attend(*reader.read(*own))
    else:
        keys, values = _read(k, v, own, reader)
        # Without a copy the kernel saves views of what this rank holds anyway.
        copies = group_size(group) > 1 or len(slices.runs) > 1
        if copies and torch.is_grad_enabled() and not metadata.recomputed:
            out = attend_with_refetch(attend, keys, values, lambda: reader.read(*own))
        else:
            out = attend(keys, values)
    return padded(out, metadata.rows)


@dataclass(frozen=True)
class _KeyReader:
    """Puts together the keys and values that a micro-batch's segments read, in one layer."""

    slices: SliceMetadata
    cache: KeyValueCache
    layer: int
    key_index: Tensor | None
    group: ProcessGroup | None

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the order of the segments, [keys, kv_heads, head_dim] each.

        ``k`` and ``v`` are this rank's own, [rows, kv_heads, head_dim].
        """
        parts = [
            (k[run.start : run.stop], v[run.start : run.stop])
            if run.micro_batch == OWN
            else self.cache.read(self.layer, run)
            for run in self.slices.runs
        ]
        if group_size(self.group) == 1:
            if len(parts) == 1:
                return parts[0]
            keys, values = zip(*parts, strict=True)
            return torch.cat(keys), torch.cat(values)
        assert self.key_index is not None
        local = k.new_empty(self.slices.rows, 2, *k.shape[1:])
        filled = local[: sum(len(keys) for keys, _ in parts)]
        for number, each in enumerate(zip(*parts, strict=True)):
            torch.cat(each, out=filled[:, number])
        both = all_gather(local, self.group).index_select(0, self.key_index)
        return both[:, 0], both[:, 1]

    def send_back(
        self, grad_keys: Tensor, grad_values: Tensor, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Send the gradients of what was read, as :meth:`read` gave it, to the rows' owners.

        Returns:
            The gradients of this rank's own keys and values, of ``shape`` each, those from later
            slices included.
        """
        dtype = sum_dtype(grad_keys.dtype)
        shares = grad_keys, grad_values
        if group_size(self.group) > 1:
            assert self.key_index is not None
            rows = group_size(self.group) * self.slices.rows
            total = summed_by_row(rows, self.key_index, grad_keys, grad_values)
            local = reduce_scatter(total.to(reduce_dtype(grad_keys.dtype)), self.group)
            shares = local[:, 0], local[:, 1]
        # What later slices have left may be added to: nothing else reads it any more.
        keys, values = self.cache.gradients_of(self.layer, self.slices.micro_batch) or (
            grad_keys.new_zeros(shape, dtype=dtype),
            grad_keys.new_zeros(shape, dtype=dtype),
        )
        first = 0
        for run in self.slices.runs:
            stop = first + run.stop - run.start
            key_share, value_share = shares[0][first:stop], shares[1][first:stop]
            if run.micro_batch == OWN:
                keys[run.start : run.stop] += key_share
                values[run.start : run.stop] += value_share
            else:
                self.cache.add_gradients(self.layer, run, key_share, value_share)
            first = stop
        return keys.to(grad_keys.dtype), values.to(grad_values.dtype)


class _Read(torch.autograd.Function):
    """Reads keys and values; backward sends their gradients to the rows' owners.

    ``own``, the same keys and values without a graph, is not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, own: tuple[Tensor, Tensor], reader: _KeyReader
    ) -> tuple[Tensor, Tensor]:
        ctx.reader, ctx.shape = reader, k.shape
        return reader.read(*own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Any, ...]:
        return *ctx.reader.send_back(grad_keys, grad_values, ctx.shape), None, None


_read: Callable[..., tuple[Tensor, Tensor]] = _Read.apply
