"""Attention split by heads over the context-parallel group (``sharding="heads"``).

One all-to-all brings every rank its part of the heads of all rows of the micro-batch, one kernel
call computes whole pieces, and a second all-to-all brings the outputs back to the rows' owners.
Backward is the same two, in reverse. Ranks hold consecutive rows of the concatenated pieces, so
that what arrives is in order and nothing is copied by index.

Where there are fewer key/value heads than ranks, each goes to every rank whose query heads read it,
and its gradients are summed in float32 for half types. Padding rows reach no other rank and are
exactly zero in output and gradients. Every rank runs the same collectives, also one without tokens.

Cost: see ``sharding/methods.py``. Nothing overlaps: queries, keys and values are sent together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.distributed.collectives import padded, sum_dtype
from lightning_wlb.sharding import check_heads


def head_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    attention: VarlenAttention,
    group: ProcessGroup,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention of all rows of a micro-batch, each rank for its part of the heads.

    The arguments are those of :func:`.context_parallel_attention`, with the queries ``q``, [rows,
    heads, head_dim], themselves; ``metadata`` has ``head_rows``.

    Returns:
        [rows, heads, head_dim], zero in padding rows.

    Raises:
        ValueError: if the group or the heads do not fit the metadata.
    """
    size, own = dist.get_world_size(group), metadata.queries
    if len(metadata.head_rows) != size or q.shape[0] != metadata.rows:
        raise ValueError(
            f"the context-parallel group has {size} rank(s) and q {q.shape[0]} rows, but the"
            f" metadata was made for {len(metadata.head_rows)} ranks and {metadata.rows} rows. Use"
            " one context_parallel_size for the strategy and the data."
        )
    check_heads(q.shape[1], k.shape[1], size)
    options.check_sinks(q)
    tokens = sum(metadata.head_rows)
    whole = replace(metadata, rows=tokens, queries=tokens, key_index=None, head_rows=())
    q, k, v = q[:own], k[:own], v[:own]
    if tokens:
        q, k, v = to_heads((q, k, v), metadata.head_rows, group)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(size)[dist.get_rank(group)])
    out = attention(q, k, v, whole, options)
    if tokens:
        out = from_heads(out, metadata.head_rows, group)
    return padded(out, metadata.rows)


def to_heads(
    tensors: Sequence[Tensor], rows: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """One all-to-all of several tensors: a rank's part of the heads of all rows.

    Args:
        tensors: [own rows, heads, width] each, of one dtype; fewer heads than ranks are sent to
            each rank that shares one.
        rows: rows of each rank.

    Returns:
        [rows of all ranks, own heads, width] each.
    """
    sent: tuple[Tensor, ...] = _ToHeads.apply(rows, group, *tensors)
    return sent


def from_heads(out: Tensor, rows: tuple[int, ...], group: ProcessGroup) -> Tensor:
    """The reverse of one tensor: [rows of all, own heads, width] -> [own rows, heads, width].

    ``rows`` are those of each rank.
    """
    sent: Tensor = _FromHeads.apply(out, rows, group)
    return sent


def _split(x: Tensor, size: int) -> Tensor:
    """[rows, heads, head_dim] -> [size, rows, own heads, head_dim]; ranks may share a head."""
    rows, heads, width = x.shape
    if heads < size:
        return x.transpose(0, 1).repeat_interleave(size // heads, dim=0).unsqueeze(2)
    return x.view(rows, size, heads // size, width).transpose(0, 1)


def _joined(x: Tensor, heads: int) -> Tensor:
    """The reverse of :func:`_split`; the shares of several ranks in one head are added."""
    size, rows, own, width = x.shape
    copies = size * own // heads
    if copies > 1:
        shares = x.view(heads, copies, rows, width)
        return shares.sum(1, dtype=sum_dtype(x.dtype)).to(x.dtype).transpose(0, 1)
    return x.transpose(0, 1).reshape(rows, heads, width)


def _by_heads(x: Tensor, rows: tuple[int, ...], group: ProcessGroup) -> Tensor:
    """All-to-all of [size, own rows, ...], one entry for each rank, to [rows of all, ...]."""
    out = x.new_empty(sum(rows), *x.shape[2:])
    own = [x.shape[1]] * len(rows)
    dist.all_to_all_single(out, x.flatten(0, 1).contiguous(), list(rows), own, group=group)
    return out


def _by_rows(x: Tensor, own: int, rows: tuple[int, ...], group: ProcessGroup) -> Tensor:
    """All-to-all of [rows of all, ...] to [size, own rows, ...], one entry from each rank."""
    size = len(rows)
    out = x.new_empty(size * own, *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), [own] * size, list(rows), group=group)
    return out.view(size, own, *x.shape[1:])


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: tuple[int, ...], group: ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.own, ctx.rows, ctx.group = tensors[0].shape[0], rows, group
        ctx.heads = [x.shape[1] for x in tensors]
        parts = [_split(x, len(rows)) for x in tensors]
        ctx.shapes = [part.shape[2:] for part in parts]
        ctx.sizes = [shape.numel() for shape in ctx.shapes]
        every = _by_heads(torch.cat([part.flatten(2) for part in parts], dim=2), rows, group)
        sent = every.split(ctx.sizes, dim=1)
        return tuple(x.unflatten(1, s) for x, s in zip(sent, ctx.shapes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        every = torch.cat([x.flatten(1) for x in gradients], dim=1)
        shares = _by_rows(every, ctx.own, ctx.rows, ctx.group).split(ctx.sizes, dim=2)
        joined = (
            _joined(x.unflatten(2, shape), heads)
            for x, shape, heads in zip(shares, ctx.shapes, ctx.heads, strict=True)
        )
        return None, None, *joined


class _FromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, rows: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        own = rows[dist.get_rank(group)]
        return _joined(_by_rows(out, own, rows, group), len(rows) * out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _by_heads(_split(gradient, len(ctx.rows)), ctx.rows, ctx.group), None, None
