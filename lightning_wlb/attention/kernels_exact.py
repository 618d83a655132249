"""A slow kernel for every option, dtype and device: plain torch operations over all pairs.

The CUDA kernels of :mod:`.kernels_gpu` support only half types. This kernel supports float32 and
float64, so that a model's gradients on a GPU can be compared with those of one process. It computes
each segment in blocks of queries. Backward recomputes each block's weights and lets autograd
differentiate them, so that only one block is in memory. Half types are computed in float32, on CUDA
with the precision of ``torch.set_float32_matmul_precision``. Repeated calls give equal bits.

Cost: all pairs of a block of :data:`BLOCK` queries with the keys that it reads, masked pairs too,
in several tensors of heads · block · keys elements at a time, keys and values repeated for each
query head, dozens of small kernels for each block, and a wait for the device in each call. It is
too slow for long training on a GPU, on which it has not been run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_wlb.attention.kernel_interface import (
    AttentionOptions,
    Segment,
    blocks_of,
    segments_of,
)
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.distributed.collectives import sum_dtype

BLOCK = 256
"""Most queries of a block."""


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    """A :class:`.Kernel` with every option, for any floating dtype and device."""
    window = options.sliding_window
    blocks = [
        block for segment in segments_of(metadata) for block in blocks_of(segment, BLOCK, window)
    ]
    inputs = (q, k, v) if options.sinks is None else (q, k, v, options.sinks)
    return _attend(blocks, replace(options, sinks=None), *inputs)


def _one_block(
    block: Segment,
    options: AttentionOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a block's queries over the keys that they read, [queries, heads, head_dim]."""
    _, count, _, before = block
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    keys = torch.arange(before + count, device=q.device)
    ahead = keys[before:, None] - keys  # [queries, keys]: how far a query is ahead of a key
    window = before + count if options.sliding_window is None else options.sliding_window
    scores = scores.masked_fill((ahead < 0) | (ahead >= window), -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(k)], v)


def _places(block: Segment) -> tuple[slice, slice, slice, slice]:
    """The rows of queries, keys, values and sinks that a block reads."""
    first_query, count, first_key, before = block
    seen = slice(first_key, first_key + before + count)
    return slice(first_query, first_query + count), seen, seen, slice(None)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: list[Segment], options: AttentionOptions, *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.blocks, ctx.options = blocks, options
        out = torch.empty_like(inputs[0])
        for block in blocks:
            places = _places(block)[: len(inputs)]
            pairs = zip(inputs, places, strict=True)
            wide = [x[place].to(sum_dtype(out.dtype)) for x, place in pairs]
            out[places[0]] = _one_block(block, options, *wide).to(out.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        dtype = sum_dtype(inputs[0].dtype)
        totals = [torch.zeros_like(x, dtype=dtype) for x in inputs]
        for block in ctx.blocks:
            places = _places(block)[: len(inputs)]
            leaves = [
                x[place].to(dtype, copy=True).requires_grad_()
                for x, place in zip(inputs, places, strict=True)
            ]
            with torch.enable_grad():
                out = _one_block(block, ctx.options, *leaves)
            found = torch.autograd.grad(out, leaves, grad_out[places[0]].to(dtype))
            for total, place, share in zip(totals, places, found, strict=True):
                total[place] += share
        gradients = [total.to(x.dtype) for total, x in zip(totals, inputs, strict=True)]
        return None, None, *gradients


_attend: Callable[..., Tensor] = _ExactAttention.apply
