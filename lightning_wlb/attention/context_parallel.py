"""Context-parallel attention: ranks exchange keys and values around one kernel call.

Every rank of a context-parallel group holds some rows of a micro-batch
(:mod:`lightning_wlb.sharding`). In forward each rank receives the keys and values that its queries
read, by the collective that the layout chooses: an all-gather, or an all-to-all of what is read. An
index then puts them in document order, both prefixes of a document at once, so that one kernel call
does the work. Backward scatter-adds the gradients of these rows and sends them back the same way,
and their owners add them up.

The queries are computed while the keys are under way. Autograd runs backward in the reverse order
of forward, so the queries' own backward runs while the gradients are sent back. The output is
projected here too, so that the keys that backward refetches (:mod:`.kv_cache`) are received while
the projection's own backward runs. Nothing else overlaps (docs/design.md says why).

Half types are summed over segments in float32, and over ranks too unless a step asks for less
(:func:`.reduce_dtype`), so that a gradient does not depend on the number of ranks beyond rounding.
Padding rows, at the local end, are cut off before the kernel, and are exactly zero in the output
and in every gradient, whatever they hold. Every rank of the group runs the same collectives, also
one without any token.

Cost: at most 2 · rows · kv_heads · head_dim elements sent to each rank, in forward and twice in
backward. Those that are read are in memory meanwhile, 1 + 1 / (2·CP) times the micro-batch for
shardings with one pair of chunks. Not for groups across slow links, where passing keys round a
ring hides the transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.kv_cache import attend_with_refetch
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.distributed.collectives import (
    all_gather_into,
    padded,
    reduce_dtype,
    reduce_scatter_into,
    summed_by_row,
)
from lightning_wlb.distributed.process_groups import group_size


def context_parallel_attention(
    queries: Callable[[], Tensor],
    k: Tensor,
    v: Tensor,
    project: Callable[[Tensor], Tensor],
    metadata: AttentionMetadata,
    attention: VarlenAttention,
    group: ProcessGroup | None,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention of this rank's queries over the keys of the whole context-parallel group.

    Args:
        queries: gives [rows, heads, head_dim], this rank's rows, padding included. It is called
            once, while keys and values are exchanged: what it computes hides the exchange, and its
            backward hides that of the gradients.
        k: [rows, kv_heads, head_dim].
        v: [rows, kv_heads, head_dim].
        project: maps attention's output, [rows, heads, head_dim] with zeros in padding rows, to the
            result. It is called once, and its backward hides the refetching of the keys.
        metadata: this rank's segments and key index, on the same device.
        group: the context-parallel group; None for one rank.
        options: the layer's, the same on every rank of the group.

    Raises:
        ValueError: if rows, metadata and group do not fit each other.
    """
    size = group_size(group)
    _check(k.shape[0], "k", metadata)
    if (metadata.key_index is None) != (size == 1):
        raise ValueError(
            f"the context-parallel group has {size} rank(s), but the metadata was made"
            f" {'without' if metadata.key_index is None else 'for'} context parallelism. Use one"
            " context_parallel_size for the strategy and the data."
        )
    if metadata.key_index is None or metadata.rows == 0:
        q = queries()
        keys, values = k[: metadata.queries], v[: metadata.queries]
    else:
        exchange = _Exchange(metadata, group)
        sent = _send(k, v, exchange)
        q = queries()
        keys, values = _receive(sent, exchange)
    _check(q.shape[0], "q", metadata)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return attention(q[: metadata.queries], keys, values, metadata, options)

    if size == 1 or metadata.rows == 0 or metadata.recomputed or not torch.is_grad_enabled():
        return project(padded(attend(keys, values), metadata.rows))
    local, refetch = (k.detach(), v.detach()), _Exchange(metadata, group)

    def fetch() -> tuple[Tensor, Tensor]:
        refetch.send(*local)
        return refetch.receive()

    out = attend_with_refetch(attend, keys, values, fetch)
    projected = project(padded(out, metadata.rows))
    if projected.requires_grad:
        projected.register_hook(lambda gradient: refetch.send(*local))
    return projected


def _check(rows: int, name: str, metadata: AttentionMetadata) -> None:
    if rows != metadata.rows:
        raise ValueError(
            f"{name} has {rows} rows, but the metadata describes {metadata.rows} rows, padding"
            " included."
        )


class _Exchange:
    """One exchange of keys and values between the ranks, or in backward of their gradients.

    Collective: every rank of the group sends, then receives.
    """

    def __init__(self, metadata: AttentionMetadata, group: ProcessGroup | None) -> None:
        self.metadata = metadata
        self.group = group
        self._buffer: Tensor | None = None
        self._shares: Tensor | None = None
        self._work: dist.Work | None = None

    def send(self, k: Tensor, v: Tensor) -> None:
        """Post this rank's [rows, kv_heads, head_dim] once, without waiting until they have
        arrived.
        """
        if self._buffer is not None:
            return
        metadata, rows = self.metadata, k.shape[0]
        self._buffer = buffer = k.new_empty(self._arriving + rows, 2, *k.shape[1:])
        arriving, local = buffer[: self._arriving], buffer[self._arriving :]
        torch.stack((k, v), dim=1, out=local)
        if metadata.gathered:
            sent = local[: metadata.gathered]
            self._work = all_gather_into(arriving, sent, group=self.group, async_op=True)
        elif metadata.send_index is not None:
            sent = local.index_select(0, metadata.send_index)
            counts = list(metadata.receive_counts), list(metadata.send_counts)
            self._work = dist.all_to_all_single(
                arriving, sent, *counts, group=self.group, async_op=True
            )

    def receive(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the segments in their order, [keys, kv_heads, head_dim] each."""
        assert self._buffer is not None
        assert self.metadata.key_index is not None
        self._wait()
        both = self._buffer.index_select(0, self.metadata.key_index)
        self._buffer = None
        return both[:, 0], both[:, 1]

    def send_back(self, grad_keys: Tensor, grad_values: Tensor) -> None:
        """Add up the gradients of each row that was read and post them to the rows' owners."""
        metadata = self.metadata
        assert metadata.key_index is not None
        self._buffer = total = summed_by_row(
            self._arriving + metadata.rows, metadata.key_index, grad_keys, grad_values
        )
        arriving = total[: self._arriving].to(reduce_dtype(grad_keys.dtype))
        if metadata.gathered:
            self._shares = arriving.new_empty(metadata.gathered, *total.shape[1:])
            self._work = reduce_scatter_into(
                self._shares, arriving, group=self.group, async_op=True
            )
        elif metadata.send_index is not None:
            self._shares = arriving.new_empty(len(metadata.send_index), *total.shape[1:])
            counts = list(metadata.send_counts), list(metadata.receive_counts)
            self._work = dist.all_to_all_single(
                self._shares, arriving, *counts, group=self.group, async_op=True
            )

    def receive_back(self) -> Tensor:
        """The gradient of this rank's own rows over all ranks, [rows, 2, kv_heads, head_dim]."""
        assert self._buffer is not None
        self._wait()
        local, shares = self._buffer[self._arriving :], self._shares
        if shares is not None and self.metadata.send_index is not None:
            local.index_add_(0, self.metadata.send_index, shares.to(local.dtype))
        elif shares is not None:
            local[: len(shares)] += shares
        self._buffer = self._shares = None
        return local

    @property
    def _arriving(self) -> int:
        """Number of rows that arrive from the group, own ones of an all-gather included."""
        gathered = self.metadata.gathered
        return dist.get_world_size(self.group) * gathered + sum(self.metadata.receive_counts)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class _Send(torch.autograd.Function):
    """Posts keys and values; backward waits for their gradients.

    Returns an empty tensor that ties :class:`_Receive` to it. The gradients themselves stay in
    the exchange: as gradients of a half-type tensor autograd would round them before they are
    added up, over the segments and ranks that read a row.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.dtype = exchange, k.dtype
        exchange.send(k, v)
        return k.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor) -> tuple[Any, ...]:
        both = ctx.exchange.receive_back().to(ctx.dtype)
        return both[:, 0], both[:, 1], None


class _Receive(torch.autograd.Function):
    """Waits for keys and values and puts them in order; backward posts their gradients."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, exchange: _Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return exchange.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Any, ...]:
        ctx.exchange.send_back(grad_keys, grad_values)
        return grad_keys.new_empty(0), None


_send: Callable[..., Tensor] = _Send.apply
_receive: Callable[..., tuple[Tensor, Tensor]] = _Receive.apply
