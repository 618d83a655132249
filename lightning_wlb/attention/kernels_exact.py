"""Dense masked attention: the definition of what is correct, and a slow kernel made of it.

:func:`dense_attention` is plain torch operations over all pairs of queries and keys. Every other
attention of this package is tested against it, and so are the gradients of whole models.

:func:`exact_attention` runs it segment by segment as a :class:`.Kernel`. The CUDA kernels of
:mod:`.kernels_gpu` have half types alone, in which gradients can be compared to two or three digits
only. This one has float32 and float64, so that a model's gradients on a GPU can be compared with
those of one process, or on a CPU. Backward computes each block's weights again and lets autograd
differentiate them, so that no more than a block is in memory. Half types are computed in float32,
which on CUDA is what ``torch.set_float32_matmul_precision`` says. Results are bit for bit the same
on every call.

Cost: all pairs of a block of :data:`BLOCK` queries with its keys, masked ones included, in several
tensors of heads · block · keys elements at a time, keys and values repeated for each query head, a
few dozen small kernels for each block, and a wait for the device in each call. Never for training
at length. It has not been run on CUDA.
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


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor,
    positions: Tensor,
    key_document_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which a token sees its own document up to its own position.

    Computed in the dtype of the inputs; give float64 where it is to judge others.

    Args:
        q: [queries, heads, head_dim].
        k: [keys, kv_heads, head_dim]. Query head h reads key head h // (heads / kv_heads).
        v: [keys, kv_heads, v_dim].
        document_ids: int [queries], equal for two tokens that may see each other.
        positions: int [queries], in tokens.
        key_document_ids: int [keys]; the queries' own where the keys are the same tokens.
        key_positions: int [keys]; the queries' own where the keys are the same tokens.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.
        sliding_window: most tokens that a token sees, itself included; all if None.
        softcap: scaled scores s become softcap · tanh(s / softcap); none if None.
        sinks: [heads], a score for each head that takes part in softmax and has no value.

    Returns:
        [queries, heads, v_dim]. A query that may see no key at all gets NaN, or zero with sinks.
    """
    key_document_ids = document_ids if key_document_ids is None else key_document_ids
    key_positions = positions if key_positions is None else key_positions
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    visible = (document_ids[:, None] == key_document_ids[None, :]) & (
        key_positions[None, :] <= positions[:, None]
    )
    if sliding_window is not None:
        visible &= positions[:, None] - key_positions[None, :] < sliding_window
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    """A :class:`.Kernel` that has every option, for any floating dtype and device.

    Raises:
        ValueError: if a segment has no query, or fewer keys than queries.
    """
    window = options.sliding_window
    blocks = [
        block for segment in segments_of(metadata) for block in blocks_of(segment, BLOCK, window)
    ]
    return _attend(q, k, v, options.sinks, blocks, replace(options, sinks=None))


def _one_block(block: Segment, inputs: Any, options: AttentionOptions) -> Tensor:
    """The output of a block's rows from their queries, the keys that they read, and sinks."""
    _, count, _, before = block
    q, k, v, sinks = inputs
    positions = torch.arange(before + count, device=q.device)
    document = torch.zeros_like(positions)
    return dense_attention(
        q,
        k,
        v,
        document[before:],
        positions[before:],
        document,
        positions,
        options.scale,
        options.sliding_window,
        options.softcap,
        sinks,
    )


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
        options: AttentionOptions,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.blocks, ctx.options = blocks, options
        out = torch.empty_like(q)
        dtype = sum_dtype(q.dtype)
        wide = None if sinks is None else sinks.to(dtype)
        for block in blocks:
            queries, seen = _rows(block)
            inputs = [x.to(dtype) for x in (q[queries], k[seen], v[seen])]
            out[queries] = _one_block(block, [*inputs, wide], options).to(q.dtype)
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
                out = _one_block(block, leaves, ctx.options)
            given = [leaf for leaf in leaves if leaf is not None]
            found = iter(torch.autograd.grad(out, given, grad_out[queries].to(dtype)))
            for total, place in zip(totals, places, strict=True):
                if total is not None:
                    total[place] += next(found)
        gradients = [
            None if total is None else total.to(x.dtype)
            for total, x in zip(totals, every, strict=True)
        ]
        return *gradients, None, None


_attend: Callable[..., Tensor] = _ExactAttention.apply
