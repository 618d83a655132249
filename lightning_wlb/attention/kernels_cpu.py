"""Variable-length attention on CPU, composed of calls that torch's CPU kernel supports.

The kernel behind ``scaled_dot_product_attention`` supports causal attention only between equally
many queries and keys (aligned at the top left). A segment whose n queries belong to the last n of m
keys is therefore computed in two calls: all n queries over the m - n keys before them, without
mask, and causally over the last n keys. Their results are merged by log-sum-exp,

    out = out_1 · exp(lse_1 - lse) + out_2 · exp(lse_2 - lse),   lse = log(exp lse_1 + exp lse_2).

Sinks (:mod:`.kernel_interface`) are merged in the same way, as one more part.

The kernel's backward recomputes probabilities as exp(score - lse). Called once for each part, with
the *merged* output and lse, it yields that part's exact share of the gradients.

In grouped-query attention the query heads that share a key/value head become a batch dimension,
over which keys and values have stride 0: nothing is copied.

Cost: the pairs that a causal mask leaves, and a constant for each call, which dominates for many
segments of few tokens; no memory that grows with queries · keys. Half types are accumulated in
float32. Torch's kernel has no soft-capped scores and no sliding windows: :mod:`.kernels_exact`
computes these, at two to three times the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_wlb.attention.kernel_interface import (
    AttentionOptions,
    Segment,
    gradient_of_sinks,
    segments_of,
    with_sinks,
)
from lightning_wlb.attention.kernels_exact import exact_attention
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.distributed.collectives import sum_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    """The :class:`.Kernel` of the CPU."""
    if options.softcap is not None or options.sliding_window is not None:
        return exact_attention(q, k, v, metadata, options)
    inputs = _dense(q), _dense(k), _dense(v), options.sinks
    return _attend(*inputs, list(segments_of(metadata)), options.scale)


def _dense(x: Tensor) -> Tensor:
    """Copy a tensor whose last dimension has gaps, since the kernel ignores that stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """View [rows, heads, head_dim] as [heads / kv_heads, kv_heads, rows, head_dim]."""
    rows, heads, head_dim = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, head_dim).permute(2, 1, 0, 3)


def _views(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    """The five tensors by :func:`_by_key_head`, keys and values expanded over the query heads."""
    kv_heads = k.shape[1]
    queries, outs, lses = (_by_key_head(x, kv_heads) for x in (q, out, lse.unsqueeze(-1)))
    keys, values = (_by_key_head(x, kv_heads).expand(len(queries), -1, -1, -1) for x in (k, v))
    return [queries, keys, values, outs, lses.squeeze(-1)]


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        segments: list[Segment],
        scale: float | None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=sum_dtype(q.dtype))
        queries, keys, values, outs, lses = _views(q, k, v, out, lse)
        extra = None if sinks is None else _by_key_head(sinks.view(1, -1, 1), k.shape[1])
        for first_query, count, first_key, before in segments:
            query = queries.narrow(2, first_query, count)
            own = slice(first_key + before, first_key + before + count)
            part, part_lse = _forward(
                query, keys[:, :, own], values[:, :, own], 0.0, True, scale=scale
            )
            if before:
                prefix = slice(first_key, first_key + before)
                other, other_lse = _forward(
                    query, keys[:, :, prefix], values[:, :, prefix], 0.0, False, scale=scale
                )
                # Merged like sinks, which have no values to add.
                part, part_lse = with_sinks(part, part_lse, other_lse)
                part += other * (other_lse - part_lse).exp_().unsqueeze(-1)
            if extra is not None:
                part, part_lse = with_sinks(part, part_lse, extra.squeeze(-1))
            outs.narrow(2, first_query, count).copy_(part)
            lses.narrow(2, first_query, count).copy_(part_lse)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v)
        )
        queries, keys, values, outs, lses = _views(q, k, v, out, lse)
        grad_outs, grad_queries = (_by_key_head(x, k.shape[1]) for x in (_dense(grad_out), grad_q))
        grad_keys, grad_values = (x.transpose(0, 1) for x in (grad_k, grad_v))
        for first_query, count, first_key, before in ctx.segments:
            query, result, grad, statistic, grad_query = (
                x.narrow(2, first_query, count)
                for x in (queries, outs, grad_outs, lses, grad_queries)
            )
            parts = [(first_key + before, count, True)]
            if before:
                parts.append((first_key, before, False))
            for first, length, causal in parts:
                key, value = (x.narrow(2, first, length) for x in (keys, values))
                shares = _backward(
                    grad, query, key, value, result, statistic, 0.0, causal, scale=ctx.scale
                )
                if causal:
                    grad_query.copy_(shares[0])
                else:
                    grad_query += shares[0]
                for whole, share in ((grad_keys, shares[1]), (grad_values, shares[2])):
                    # Only one call reads a key.
                    total = share[0] if len(share) == 1 else share.sum(0, dtype=lse.dtype)
                    whole.narrow(1, first, length).copy_(total)
        grad_sinks = None if sinks is None else gradient_of_sinks(grad_out, out, lse, sinks)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


_attend: Callable[..., Tensor] = _CpuAttention.apply
