"""The time of one attention call on random tensors, ours and the library's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.profile import dtype_of
from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN
from lightning_wlb.attention.kernels_cpu import cpu_attention
from lightning_wlb.attention.kernels_gpu import flash_library
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.profiling.call_timer import CallTimer

REPEATS = 5

Segments = tuple[list[int], list[int]]
"""Queries and keys of each segment."""


class Kernel:
    """Timed attention of one layer.

    Args:
        shape: of the layer.
        device: that runs it.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._attention, self._timer = VarlenAttention(), CallTimer(device)

    def ms(self, segments: Segments, *, ranks: int = 1, backward: bool = True) -> float:
        """One call over segments, of the heads of one of ``ranks`` ranks that split them."""
        leaves, gradient, metadata = self._inputs(segments, ranks)
        call = self._attention
        return self._timed(lambda q, k, v: call(q, k, v, metadata), leaves, gradient, backward)

    def bare_ms(self, segments: Segments) -> float:
        """The same by the kernel library's own function, forward and backward."""
        leaves, gradient, metadata = self._inputs(segments, 1)
        name = self._attention.kernel_name(self.device.type)
        return self._timed(bare_call(name, metadata), leaves, gradient, True)

    def _inputs(
        self, segments: Segments, ranks: int
    ) -> tuple[list[Tensor], Tensor, AttentionMetadata]:
        """Random q, k, v, an output gradient, and the metadata of one call."""
        queries, keys = segments
        rows, read, shape = sum(queries), sum(keys), self.shape
        metadata = AttentionMetadata(
            rows=rows,
            queries=rows,
            cu_seqlens_q=torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32),
            cu_seqlens_k=torch.tensor(np.cumsum([0, *keys]), dtype=torch.int32),
            max_seqlen_q=max(queries),
            max_seqlen_k=max(keys),
            # Only its length is looked at: keys are given in the order of the segments.
            key_index=torch.empty(read, dtype=torch.int64),
        ).to(self.device)
        heads, kv_heads = shape.heads // ranks, max(shape.kv_heads // ranks, 1)
        sizes = (rows, heads), (read, kv_heads), (read, kv_heads), (rows, heads)
        q, k, v, gradient = (
            torch.randn(*size, shape.head_dim, dtype=dtype_of(self.device), device=self.device)
            for size in sizes
        )
        return [q, k, v], gradient, metadata

    def _timed(
        self,
        call: Callable[..., Tensor],
        leaves: list[Tensor],
        gradient: Tensor,
        backward: bool,
    ) -> float:
        for leaf in leaves:
            leaf.requires_grad_(backward)

        def back(out: Tensor) -> None:
            if backward:
                torch.autograd.grad(out, leaves, gradient, retain_graph=True)

        seconds = self._timer.medians(lambda: call(*leaves), back, REPEATS)
        return float(seconds[: 1 + backward].sum()) * 1e3


def bare_call(name: str, metadata: AttentionMetadata) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function of the library behind a kernel, causal, without anything of this package.

    Args:
        name: of the kernel (:func:`.kernel_name`).
        metadata: of the call.
    """
    bounds = metadata.cu_seqlens_q, metadata.cu_seqlens_k
    most = metadata.max_seqlen_q, metadata.max_seqlen_k
    if name == "cpu":
        return lambda q, k, v: cpu_attention(q, k, v, metadata, PLAIN)
    if name.startswith("torch"):
        from torch.nn.attention.varlen import varlen_attn

        return lambda q, k, v: varlen_attn(q, k, v, *bounds, *most, window_size=(-1, 0))
    library = flash_library()[0]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = library(
            q,
            k,
            v,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=most[0],
            max_seqlen_k=most[1],
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return call
