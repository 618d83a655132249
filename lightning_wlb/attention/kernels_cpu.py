"""Variable-length attention on CPU, out of the two calls that torch's CPU kernel gets right.

The kernel behind ``scaled_dot_product_attention`` knows causal attention only between equally
many queries and keys (aligned at the top left). A segment whose n queries are the last of m keys
is therefore computed in two calls: all n queries over the m - n keys before them, without mask,
and causally over the last n keys. Their results are merged by log-sum-exp,

    out = out_1 · exp(lse_1 - lse) + out_2 · exp(lse_2 - lse),   lse = log(exp lse_1 + exp lse_2).

A sliding window of W keys cuts the queries into blocks of fewer than W, each a segment that reads
the W - 1 keys in front of it and its own; the window is then a mask on the former alone.

The kernel's backward recomputes probabilities as exp(score - lse), so called once for each part
with the *merged* output and lse it yields that part's exact share of the gradients (to 1e-15 in
float64).

Grouped-query attention makes the members of a group a batch dimension over which keys and values
have stride 0; nothing is copied, and no version of the kernel needs to know about groups.

Cost: the pairs a causal mask leaves, about 20 µs per call on top of them, and no memory that
grows with queries · keys. Many segments of a few tokens are dominated by the calls.
A sliding window computes up to twice its pairs. Not for windows of a few tokens.
float16, bfloat16, float32 and float64; half types are accumulated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 256
"""Most queries of a block under a sliding window; a mask is a block times a window."""

_Segment = tuple[int, int, int, int]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention of packed segments; shapes as in :class:`.varlen.VarlenAttention`."""
    segments = list(_segments(cu_seqlens_q, cu_seqlens_k))
    if sliding_window is not None:
        segments = [block for each in segments for block in _blocks(*each, sliding_window)]
    return _attend(_dense(q), _dense(k), _dense(v), segments, scale, sliding_window)


def _segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[_Segment]:
    """(first query, queries, first key, keys before the first query) of each segment."""
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (first_query, stop_query), (first_key, stop_key) in bounds:
        queries = stop_query - first_query
        before = stop_key - first_key - queries
        # An empty operand kills the process inside the kernel, so this is worth its price.
        if queries < 1 or before < 0:
            raise ValueError(
                f"attention segment with {queries} queries and {stop_key - first_key} keys: there"
                " must be at least one query and at least as many keys as queries."
            )
        yield first_query, queries, first_key, before


def _blocks(
    first_query: int, queries: int, first_key: int, before: int, sliding_window: int
) -> Iterator[_Segment]:
    """The segment in blocks whose every query sees a key in front of the block, if one is there."""
    size = min(max(sliding_window - 1, 1), BLOCK)
    if before + queries <= sliding_window:
        size = queries
    for start in range(0, queries, size):
        missed = max(before + start - (sliding_window - 1), 0)
        count = min(size, queries - start)
        yield first_query + start, count, first_key + missed, before + start - missed


def _mask(query: Tensor, before: int, sliding_window: int | None) -> Tensor | None:
    """[queries, before], -inf where a key is outside of the window; None where none is."""
    count = query.shape[2]
    if sliding_window is None or before + count <= sliding_window:
        return None
    # Query i stands before + i - j behind key j.
    outside = torch.ones(count, before, dtype=torch.bool).tril(before - sliding_window)
    return query.new_zeros(count, before).masked_fill_(outside, -math.inf)


def _dense(x: Tensor) -> Tensor:
    """The kernel takes strides for all dimensions but the last, which it reads as dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, head_dim] as [group, kv_heads, rows, head_dim], a view."""
    rows, heads, head_dim = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, head_dim).permute(2, 1, 0, 3)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: list[_Segment],
        scale: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        kv_heads = k.shape[1]
        out = torch.empty(q.shape, dtype=q.dtype)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(q.shape[:2], dtype=wide)
        queries, outs = _grouped(q, kv_heads), _grouped(out, kv_heads)
        keys, values = (_grouped(x, kv_heads).expand(queries.shape[0], -1, -1, -1) for x in (k, v))
        lses = _grouped(lse.unsqueeze(-1), kv_heads).squeeze(-1)
        for first_query, count, first_key, before in segments:
            query = queries.narrow(2, first_query, count)
            own = slice(first_key + before, first_key + before + count)
            part, part_lse = _forward(
                query, keys[:, :, own], values[:, :, own], 0.0, True, scale=scale
            )
            if before:
                prefix = slice(first_key, first_key + before)
                other, other_lse = _forward(
                    query,
                    keys[:, :, prefix],
                    values[:, :, prefix],
                    0.0,
                    False,
                    attn_mask=_mask(query, before, sliding_window),
                    scale=scale,
                )
                merged = torch.logaddexp(part_lse, other_lse)
                part = part * (part_lse - merged).exp_().unsqueeze(-1)
                part += other * (other_lse - merged).exp_().unsqueeze(-1)
                part_lse = merged
            outs.narrow(2, first_query, count).copy_(part)
            lses.narrow(2, first_query, count).copy_(part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale, ctx.sliding_window = segments, scale, sliding_window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kv_heads = k.shape[1]
        grad_q = torch.empty_like(q)
        # A key is read by every member of its group, and by every block whose window it is in;
        # without a window by one call alone.
        alone = ctx.sliding_window is None
        grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if alone
            else torch.zeros(x.shape, dtype=lse.dtype)
            for x in (k, v)
        )
        queries, outs, grad_outs, grad_queries = (
            _grouped(x, kv_heads) for x in (q, out, _dense(grad_out), grad_q)
        )
        keys, values = (_grouped(x, kv_heads).expand(queries.shape[0], -1, -1, -1) for x in (k, v))
        grad_keys, grad_values = (x.transpose(0, 1) for x in (grad_k, grad_v))
        lses = _grouped(lse.unsqueeze(-1), kv_heads).squeeze(-1)
        for first_query, count, first_key, before in ctx.segments:
            query, result, grad, statistic, grad_query = (
                x.narrow(2, first_query, count)
                for x in (queries, outs, grad_outs, lses, grad_queries)
            )
            parts = [(first_key + before, count, True)]
            if before:
                parts.append((first_key, before, False))
            for first, length, causal in parts:
                shares = _backward(
                    grad,
                    query,
                    keys.narrow(2, first, length),
                    values.narrow(2, first, length),
                    result,
                    statistic,
                    0.0,
                    causal,
                    attn_mask=None if causal else _mask(query, length, ctx.sliding_window),
                    scale=ctx.scale,
                )
                if causal:
                    grad_query.copy_(shares[0])
                else:
                    grad_query += shares[0]
                for whole, share in ((grad_keys, shares[1]), (grad_values, shares[2])):
                    part = whole.narrow(1, first, length)
                    total = share[0] if len(share) == 1 else share.sum(0, dtype=lse.dtype)
                    (part.copy_ if alone else part.add_)(total)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


_attend: Callable[..., Tensor] = _CpuAttention.apply
