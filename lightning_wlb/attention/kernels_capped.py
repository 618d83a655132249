"""Variable-length attention on CPU with soft-capped scores, which torch's CPU kernel does not have.

With S = scale · q kᵀ the probabilities are the softmax of C = cap · tanh(S / cap) over the keys in
sight and the sink, if any. With P the probabilities, O the output and dO its gradient,

    dV = Pᵀ dO,   dC = P · (dO Vᵀ - rowsum(dO · O)),   dS = dC · (1 - (C / cap)²),

and dq, dk follow from dS. Backward computes P again from the log-sum-exp that forward keeps.

Segments are computed in blocks of queries, over the keys from the first that the block sees. In
grouped-query attention the queries of all heads that share a key head are rows of one matrix, so
that keys and values are not repeated.

Cost: two matrix products in forward and five in backward, masked pairs of a block included, and
several tensors of :data:`BLOCK` · heads · keys elements at a time. Slower than a fused kernel; it
is there to be right. Not where there is no cap. Half types are computed in float32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_wlb.attention.kernel_interface import (
    AttentionOptions,
    Segment,
    blocks_of,
    gradient_of_sinks,
)
from lightning_wlb.distributed.collectives import sum_dtype

BLOCK = 128
"""Most queries of a block."""


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], options: AttentionOptions
) -> Tensor:
    """A :class:`.kernel.Kernel` for ``options`` with a ``softcap``; all segments have queries."""
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    window = options.sliding_window
    blocks = [block for segment in segments for block in blocks_of(segment, BLOCK, window)]
    return _attend(q, k, v, options.sinks, blocks, scale, window, options.softcap)


class _Block:
    """Queries, keys and values of one block: a batch of key heads, in the wide dtype."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, block: Segment, scale: float, cap: float
    ) -> None:
        first_query, self.count, first_key, self.before = block
        self.rows = slice(first_query, first_query + self.count)
        self.seen = slice(first_key, first_key + self.before + self.count)
        self.kv_heads, self.scale, self.cap = k.shape[1], scale, cap
        self.dtype = sum_dtype(q.dtype)
        self.query = self.stacked(q)
        self.keys, self.values = (x[self.seen].to(self.dtype).transpose(0, 1) for x in (k, v))

    def stacked(self, x: Tensor) -> Tensor:
        """The block's rows of [queries, heads, width] as [kv_heads, group · count, width]."""
        rows = x[self.rows].to(self.dtype).unflatten(1, (self.kv_heads, -1))
        return rows.permute(1, 2, 0, 3).flatten(1, 2)

    def unstacked(self, x: Tensor) -> Tensor:
        """The reverse of :meth:`stacked`: [count, heads, width]."""
        return x.unflatten(1, (-1, self.count)).permute(2, 0, 1, 3).flatten(1, 2)

    def capped_tanh(self) -> Tensor:
        """Tanh of the scaled scores over the cap: [kv_heads, group · count, keys]."""
        return (self.query @ self.keys.mT).mul_(self.scale / self.cap).tanh_()

    def masked(self, scores: Tensor, window: int | None) -> Tensor:
        """The scores, changed in place to -inf where a query does not see a key."""
        hidden = torch.ones(self.count, self.before + self.count, dtype=torch.bool)
        # Query i stands before + i - j behind key j.
        hidden = hidden.triu(self.before + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(self.before - window)
        scores.unflatten(1, (-1, self.count)).masked_fill_(hidden, -math.inf)
        return scores


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        blocks: list[Segment],
        scale: float,
        window: int | None,
        cap: float,
    ) -> Tensor:
        out = q.new_empty(q.shape)
        lse = q.new_empty(*q.shape[:2], 1, dtype=sum_dtype(q.dtype))
        for each in blocks:
            block = _Block(q, k, v, each, scale, cap)
            scores = block.masked(block.capped_tanh().mul_(cap), window)
            total = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                one_each = sinks.to(lse.dtype).view(block.kv_heads, -1, 1)
                one_each = one_each.expand(-1, -1, block.count).flatten(1).unsqueeze(-1)
                total = torch.logaddexp(total, one_each)
            lse[block.rows] = block.unstacked(total)
            out[block.rows] = block.unstacked((scores - total).exp_() @ block.values).to(out.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = blocks, scale, window, cap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        blocks, scale, window, cap = ctx.rest
        grad_q = q.new_empty(q.shape)
        grad_k, grad_v = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        for each in blocks:
            block = _Block(q, k, v, each, scale, cap)
            tanh, grad = block.capped_tanh(), block.stacked(grad_out)
            weights = block.masked(tanh * cap, window).sub_(block.stacked(lse)).exp_()
            along = (grad * block.stacked(out)).sum(-1, keepdim=True)
            grad_v[block.seen] += (weights.mT @ grad).transpose(0, 1)
            grad_capped = (grad @ block.values.mT).sub_(along).mul_(weights)
            grad_scores = grad_capped.mul_(1 - tanh.square_()).mul_(scale)
            grad_q[block.rows] = block.unstacked(grad_scores @ block.keys).to(q.dtype)
            grad_k[block.seen] += (grad_scores.mT @ block.query).transpose(0, 1)
        grad_sinks = None
        if sinks is not None:
            grad_sinks = gradient_of_sinks(grad_out, out, lse.squeeze(-1), sinks)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None, None, None


_attend: Callable[..., Tensor] = _CappedAttention.apply
