"""Attention of segments and of one rank's part of a micro-batch, compared with dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions, Kernel
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.packed import packed_attention
from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.sharding import Layout, RankIndices, rank_indices
from tests.device import DEVICE
from tests.oracle import dense_attention

HALF = [97, 1, 31, 300]
"""A micro-batch for half types."""

Attend = Callable[
    [Tensor, Tensor, Tensor, AttentionMetadata, VarlenAttention, AttentionOptions], Tensor
]
"""``attend(q, k, v, metadata, attention, options)``."""


class Counter:
    """A timer that counts."""

    starts = stops = 0

    def start(self) -> None:
        self.starts += 1

    def stop(self) -> None:
        self.stops += 1


class Watched(TorchDispatchMode):
    """The operators that run, and the elements of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def as_it_is(out: Tensor) -> Tensor:
    """In place of a layer's output projection."""
    return out


def everything(
    lengths: Sequence[int],
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    options: AttentionOptions = PLAIN,
    value_dim: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """A micro-batch's q, k, v and output gradient; then output and gradients by the reference.

    The reference computes in float64 from the rounded inputs. Where there are sinks, their
    gradient is the last.
    """
    value_dim = value_dim or head_dim
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    inputs = [
        torch.randn(tokens, count, width, dtype=torch.float64, generator=generator).to(dtype)
        for count, width in (
            (heads[0], head_dim),
            (heads[1], head_dim),
            (heads[1], value_dim),
            (heads[0], value_dim),
        )
    ]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths).long())
    positions = torch.cat([torch.arange(length) for length in [*lengths, 0]])
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    sinks = [] if options.sinks is None else [options.sinks.detach().double().requires_grad_()]
    if tokens:
        named = vars(replace(options, sinks=sinks[0] if sinks else None))
        out = dense_attention(*leaves, documents, positions, **named)
        wanted = [out, *torch.autograd.grad(out, [*leaves, *sinks], inputs[3].double())]
    else:
        wanted = [x.double() for x in (inputs[3], *inputs[:3], *(0 * each for each in sinks))]
    return inputs, [x.detach() for x in wanted]


def tokens_of(indices: RankIndices, lengths: Sequence[int]) -> Tensor:
    """Which token of the concatenated pieces each real row of a rank holds."""
    first = torch.tensor([0, *lengths]).cumsum(0)
    return first[torch.from_numpy(indices.document)] + torch.from_numpy(indices.offset)


def rank_errors(
    attend: Attend,
    made: Layout,
    indices: RankIndices,
    kernels: int,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float64,
    options: AttentionOptions = PLAIN,
    value_dim: int | None = None,
) -> list[float]:
    """This rank's part of the relative errors of the output and of the gradients of q, k, v.

    Where there are sinks, the last error is of their gradient, summed over all ranks. Checked here:
    padding rows, which hold NaN, are exactly zero in all four, and the kernel is called, and timed,
    ``kernels`` times in each pass.

    Args:
        attend: the way to attend, on this rank.
        made: how the micro-batch lies on the ranks.
        indices: of this rank.
        kernels: calls of the kernel that are expected.
        heads: of queries and of keys.
        dtype: of the inputs.
        options: of the kernel; their window is that of the indices.
        value_dim: width of values; that of keys if None.
    """
    inputs, wanted = everything(made.lengths, dtype, heads, options=options, value_dim=value_dim)
    window = options.sliding_window
    metadata = AttentionMetadata.from_indices(indices, made.rows, made.ranks, window).to(DEVICE)
    tokens = tokens_of(indices, made.lengths)

    def local(x: Tensor) -> Tensor:
        rows = torch.full((made.rows, *x.shape[1:]), math.nan, dtype=dtype)
        rows[: metadata.queries] = x[tokens]
        return rows.to(DEVICE)

    attention = VarlenAttention()
    attention.timer = timer = Counter()
    leaves = [local(x).requires_grad_() for x in inputs[:3]]
    sinks = (
        []
        if options.sinks is None
        else [options.sinks.detach().to(DEVICE, copy=True).requires_grad_()]
    )
    options = replace(options, sinks=sinks[0] if sinks else None)
    out = attend(*leaves, metadata, attention, options)
    found = torch.autograd.grad(out, [*leaves, *sinks], local(inputs[3]))
    got = [out.detach(), *found[:3]]
    assert (timer.starts, timer.stops) == (2 * kernels, 2 * kernels)
    errors = []
    for mine, whole in zip(got, wanted[:4], strict=True):
        assert mine.shape[0] == made.rows
        assert mine.dtype == dtype
        assert torch.equal(mine[metadata.queries :], torch.zeros_like(mine[metadata.queries :]))
        error = mine[: metadata.queries].cpu().double() - whole[tokens]
        errors.append(float(error.norm() / whole.norm().clamp(min=1)))
    if sinks:
        total = found[3].contiguous()  # the gradient of a sum is one element, expanded
        if made.ranks > 1:
            dist.all_reduce(total)
        errors.append(float((total.cpu() - wanted[4]).norm() / wanted[4].norm().clamp(min=1)))
    assert not any(map(math.isnan, errors))
    return errors


def errors_by_keys(
    rank: int,
    group: ProcessGroup | None,
    made: Layout,
    dtype: torch.dtype = torch.float64,
    options: AttentionOptions = PLAIN,
) -> list[float]:
    """:func:`rank_errors` where ranks exchange keys."""
    indices = rank_indices(made, rank, options.sliding_window)

    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        metadata, attention, of_layer = others
        groups = ProcessGroups(context=group)
        return packed_attention(lambda: q, k, v, as_it_is, metadata, attention, groups, of_layer)

    kernels = int(len(indices.offset) > 0)
    return rank_errors(attend, made, indices, kernels, dtype=dtype, options=options)


Segments = Sequence[tuple[int, int]]
"""(queries, keys) of each segment."""

SEGMENTS: Segments = [(1, 1), (5, 5), (1, 9), (37, 101), (3, 600), (1, 1), (2, 3), (257, 257)]


def metadata_of(segments: Segments, device: str | torch.device = "cpu") -> AttentionMetadata:
    queries, keys = ([0, *(segment[part] for segment in segments)] for part in (0, 1))
    return AttentionMetadata(
        rows=sum(queries),
        queries=sum(queries),
        cu_seqlens_q=torch.tensor(queries).cumsum(0).to(torch.int32),
        cu_seqlens_k=torch.tensor(keys).cumsum(0).to(torch.int32),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        key_index=torch.arange(sum(keys)),
    ).to(device)


def random_inputs(
    segments: Segments, heads: int, kv_heads: int, head_dim: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient of the output in float64."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (sum(segment[part] for segment in segments) for part in (0, 1))
    return tuple(
        torch.randn(rows, count, head_dim, dtype=torch.float64, generator=generator)
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    )


def attending(
    kernel: Kernel | VarlenAttention, metadata: AttentionMetadata, options: AttentionOptions = PLAIN
) -> Callable[..., Tensor]:
    """The kernel as a function of q, k, v and perhaps sinks, wherever these are."""
    device = metadata.cu_seqlens_q.device

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        of_layer = replace(options, sinks=None if sinks is None else sinks.to(device))
        return kernel(q.to(device), k.to(device), v.to(device), metadata, of_layer)

    return attend


def results(
    attend: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    gradient: Tensor,
) -> list[Tensor]:
    """Output and gradients of the inputs: q, k, v and perhaps sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out))]


def reference(segments: Segments, options: AttentionOptions = PLAIN) -> Callable[..., Tensor]:
    """Dense attention of packed q, k, v and, as a fourth argument, sinks."""
    ids, positions, key_ids, key_positions = (
        torch.cat([torch.tensor(part) for part in parts])
        for parts in zip(
            *(
                ([number] * q, list(range(k - q, k)), [number] * k, list(range(k)))
                for number, (q, k) in enumerate(segments)
            ),
            strict=True,
        )
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        named = vars(replace(options, sinks=sinks))
        return dense_attention(q, k, v, ids, positions, key_ids, key_positions, **named)

    return attend


def assert_close(got: Sequence[Tensor], wanted: Sequence[Tensor], bound: float) -> None:
    """Relative error in the 2-norm, of the output and of each gradient.

    Where a query sees one key its gradient is zero, by cancellation of terms of size 1.
    """
    names = ("out", "dq", "dk", "dv", "dsinks")[: len(wanted)]
    for name, x, y in zip(names, got, wanted, strict=True):
        error = (x.cpu().double() - y).norm() / y.norm().clamp(min=1)
        assert error <= bound, f"{name}: relative error {error:.1e} > {bound:.0e}"
