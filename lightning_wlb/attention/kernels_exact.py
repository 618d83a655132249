"""Dense attention, segment by segment, on any device: slow, and right to the last digits.

The CUDA kernels of :mod:`.kernels_gpu` know half types alone, in which no gradient can be told from
another to more than two or three digits. This one has float32 and float64 there, so that a model's
gradients on a GPU can be compared with those of one process, or on a CPU.

It is :func:`.dense_attention`, the definition of right, on the queries of a block and the keys that
they may see. Backward makes each block's weights again and lets autograd differentiate them, so
that a block is the most that is in memory. Half types are computed in float32, which on CUDA is
what ``torch.set_float32_matmul_precision`` says. Results are bit for bit the same on every call:
nothing is added up in an order that depends on time.

Cost: all pairs of a block of :data:`BLOCK` queries with its keys, masked ones included, in
several tensors of heads · block · keys elements at a time, keys and values repeated for each query
head, a few dozen small kernels for each block, and a wait for the device in each call. Never for
training at length. It has not been run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_wlb.attention.kernel import AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.reference import dense_attention
from lightning_wlb.attention.segments import Segment, blocks_of, segments_of
from lightning_wlb.distributed.collectives import sum_dtype

BLOCK = 256
"""Most queries of a block."""


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """A :class:`.kernel.Kernel` that has every option, for any floating dtype and device.

    Raises:
        ValueError: if a segment has no query, or fewer keys than queries.
    """
    window = options.sliding_window
    blocks = [
        block for segment in segments_of(metadata) for block in blocks_of(segment, BLOCK, window)
    ]
    return _attend(q, k, v, options.sinks, blocks, options.scale, window, options.softcap)


def _one_block(
    block: Segment,
    inputs: Any,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The output of a block's rows from their queries, the keys that they read, and sinks."""
    _, count, _, before = block
    q, k, v, sinks = inputs
    positions = torch.arange(before + count, device=q.device)
    document = torch.zeros_like(positions)
    of_queries = document[before:], positions[before:]
    return dense_attention(q, k, v, *of_queries, document, positions, scale, window, softcap, sinks)


def _rows(block: Segment) -> tuple[slice, slice]:
    """The block's queries, and the keys that it reads."""
    first_query, count, first_key, before = block
    return slice(first_query, first_query + count), slice(first_key, first_key + before + count)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        blocks: list[Segment],
        *options: Any,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.blocks, ctx.options = blocks, options
        out = torch.empty_like(q)
        dtype = sum_dtype(q.dtype)
        wide = None if sinks is None else sinks.to(dtype)
        for block in blocks:
            queries, seen = _rows(block)
            inputs = [x.to(dtype) for x in (q[queries], k[seen], v[seen])]
            out[queries] = _one_block(block, [*inputs, wide], *options).to(q.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        every = ctx.saved_tensors
        dtype = sum_dtype(every[0].dtype)
        totals = [None if x is None else torch.zeros_like(x, dtype=dtype) for x in every]
        for block in ctx.blocks:
            queries, seen = _rows(block)
            places = queries, seen, seen, slice(None)
            leaves = [
                None if x is None else x[place].to(dtype, copy=True).requires_grad_()
                for x, place in zip(every, places, strict=True)
            ]
            with torch.enable_grad():
                out = _one_block(block, leaves, *ctx.options)
            given = [leaf for leaf in leaves if leaf is not None]
            found = iter(torch.autograd.grad(out, given, grad_out[queries].to(dtype)))
            for total, place in zip(totals, places, strict=True):
                if total is not None:
                    total[place] += next(found)
        gradients = [
            None if total is None else total.to(x.dtype)
            for total, x in zip(totals, every, strict=True)
        ]
        return *gradients, *[None] * (1 + len(ctx.options))


_attend: Callable[..., Tensor] = _ExactAttention.apply
