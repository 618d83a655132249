"""Exchange of keys and values around variable-length attention, and its autograd.

Every rank of a context-parallel group holds some rows of a micro-batch (:mod:`.sharding`). In
forward the keys and values that other ranks read travel in one collective: an all-gather of the
rows of pieces that lie on several ranks, or an all-to-all of just the prefixes that are read,
whichever the layout says; nothing where every piece lies whole on one rank. An index then puts
what this rank's queries see in document order, both prefixes of a document at once, so that one
kernel call does the work. Backward scatter-adds the gradients of these rows and sends them back
the same way, to be summed by their owners.

Sums over ranks and over segments are taken in float32 for half types and in the type itself
otherwise, so a gradient does not depend on the number of ranks beyond rounding.

Padding rows (at the local end) are cut off before the kernel and are exactly zero in the output
and in every gradient, whatever they hold; no index points at them. Every rank of the group runs
the same collectives, also one without any token.

Only the local keys and values are kept for backward, which exchanges them again
(:mod:`.read_again`), unless the whole layer runs again there anyway.

Cost: at most 2 · rows · kv_heads · head_dim elements sent to each rank, in forward and twice in
backward; those read are in memory during each (1 + 1/(2·CP) times the micro-batch for shardings
with one pair of chunks). Not for groups across slow links, where
passing keys round a ring hides the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.read_again import attend_reading_again
from lightning_wlb.attention.varlen import AttentionMetadata, VarlenAttention

# torch 2.13 renamed both; the old names warn there, the new ones do not exist before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Rows of all ranks of a group, one rank after another.

    Args:
        x: [rows, ...], equally shaped on every rank.
        group: None, or a group of one rank, for the identity.

    Returns:
        [group size · rows, ...]. Backward sums the gradients over the ranks, in float32 for half
        types, and gives each rank its own rows.
    """
    if _trivial(x, group):
        return x
    return _gather_rows(x, group)


def scatter_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks of a group, of which each rank gets its own rows.

    Args:
        x: [group size · rows, ...], equally shaped on every rank.
        group: None, or a group of one rank, for the identity.

    Returns:
        [rows, ...]; summed in float32 for half types. Backward gathers the gradient's rows.

    Raises:
        ValueError: if the rows do not divide by the group's size.
    """
    if _trivial(x, group):
        return x
    size = dist.get_world_size(group)
    if x.shape[0] % size:
        raise ValueError(
            f"{x.shape[0]} rows cannot be scattered over {size} ranks; the sharding pads rows to a"
            " multiple of the tensor-parallel size."
        )
    return _scatter_rows(x, group)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    attention: VarlenAttention,
    group: ProcessGroup | None,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of the whole context-parallel group.

    Args:
        q: [rows, heads, head_dim], local rows including padding.
        k: [rows, kv_heads, head_dim].
        v: [rows, kv_heads, head_dim].
        metadata: this rank's segments and key index, on the same device.
        attention: the kernel.
        group: the context-parallel group; None or a group of one rank without it.
        scale: factor of the scores, 1 / sqrt(head_dim) unless given.

    Returns:
        [rows, heads, head_dim], zero in padding rows.

    Raises:
        ValueError: if rows, metadata and group do not fit each other.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if q.shape[0] != metadata.rows or k.shape[0] != metadata.rows:
        raise ValueError(
            f"q has {q.shape[0]} and k {k.shape[0]} rows, but the metadata describes"
            f" {metadata.rows} rows, padding included."
        )
    if (metadata.key_index is None) != (size == 1):
        raise ValueError(
            f"the context-parallel group has {size} rank(s), but the metadata was made"
            f" {'without' if metadata.key_index is None else 'for'} context parallelism. Use one"
            " context_parallel_size for the strategy and the data."
        )
    if metadata.key_index is None or metadata.rows == 0:
        keys, values = k[: metadata.queries], v[: metadata.queries]
    else:
        keys, values = _exchange_keys(k, v, metadata, group)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return attention(q[: metadata.queries], keys, values, metadata, scale)

    if size > 1 and torch.is_grad_enabled() and not metadata.recomputed:
        held = k.detach(), v.detach()
        out = attend_reading_again(attend, keys, values, lambda: _read(*held, metadata, group))
    else:
        out = attend(keys, values)
    padding = metadata.rows - metadata.queries
    return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


def _trivial(x: Tensor, group: ProcessGroup | None) -> bool:
    """Whether there is nothing to send; row counts are equal, so all ranks agree."""
    return group is None or dist.get_world_size(group) == 1 or x.shape[0] == 0


def gathered(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Rows of all ranks of a group, outside of autograd."""
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(out, x.contiguous(), group=group)
    return out


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def summed(x: Tensor, group: ProcessGroup | None, dtype: torch.dtype) -> Tensor:
    """Reduce-scatter of [group size · rows, ...], summed in at least float32."""
    x = x.to(wide(x.dtype)).contiguous()
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    _reduce_scatter(out, x, group=group)
    return out.to(dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return summed(gradient, ctx.group, gradient.dtype), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gathered(gradient, ctx.group), None


class _ExchangeKeys(torch.autograd.Function):
    """Exchange keys and values and pick the rows that this rank's segments read, in their order.

    One node and not an exchange followed by an index: its backward adds up the gradients of a row
    that several segments read, and of all ranks, before it rounds them to a half type.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, metadata: AttentionMetadata, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.group = metadata, group
        return _read(k, v, metadata, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Any, ...]:
        metadata, group = ctx.exchange, ctx.group
        dtype, rows = grad_keys.dtype, metadata.rows
        total = grad_keys.new_zeros(
            _arriving(metadata, group) + rows, 2, *grad_keys.shape[1:], dtype=wide(dtype)
        )
        total[:, 0].index_add_(0, metadata.key_index, grad_keys.to(total.dtype))
        total[:, 1].index_add_(0, metadata.key_index, grad_values.to(total.dtype))
        arriving, local = total[:-rows], total[-rows:]
        if metadata.gathered:
            local[: metadata.gathered] += summed(arriving, group, total.dtype)
        elif metadata.send_index is not None:
            shares = total.new_empty(len(metadata.send_index), *total.shape[1:])
            _all_to_all(shares, arriving, metadata.send_counts, metadata.receive_counts, group)
            local.index_add_(0, metadata.send_index, shares)
        local = local.to(dtype)
        return local[:, 0], local[:, 1], None, None


def _read(
    k: Tensor, v: Tensor, metadata: AttentionMetadata, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of the segments in their order, outside of autograd. Collective."""
    assert metadata.key_index is not None
    rows = k.shape[0]
    if rows == 0:
        return k, v
    buffer = k.new_empty(_arriving(metadata, group) + rows, 2, *k.shape[1:])
    arriving, local = buffer[:-rows], buffer[-rows:]
    torch.stack((k, v), dim=1, out=local)
    if metadata.gathered:
        _all_gather(arriving, local[: metadata.gathered], group=group)
    elif metadata.send_index is not None:
        sent = local.index_select(0, metadata.send_index)
        _all_to_all(arriving, sent, metadata.receive_counts, metadata.send_counts, group)
    both = buffer.index_select(0, metadata.key_index)
    return both[:, 0], both[:, 1]


def _arriving(metadata: AttentionMetadata, group: ProcessGroup | None) -> int:
    """Rows that arrive from the group, own ones of an all-gather included."""
    return dist.get_world_size(group) * metadata.gathered + sum(metadata.receive_counts)


def _all_to_all(
    out: Tensor,
    x: Tensor,
    receive_counts: Sequence[int],
    send_counts: Sequence[int],
    group: ProcessGroup | None,
) -> None:
    dist.all_to_all_single(out, x, list(receive_counts), list(send_counts), group=group)


_gather_rows: Callable[..., Tensor] = _GatherRows.apply
_scatter_rows: Callable[..., Tensor] = _ScatterRows.apply
_exchange_keys: Callable[..., tuple[Tensor, Tensor]] = _ExchangeKeys.apply
