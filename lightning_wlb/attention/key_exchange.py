"""Messages that bring a rank the keys and values that its queries read, and take gradients back.

Every rank of a context-parallel group holds some rows of a micro-batch
(:mod:`lightning_wlb.sharding`), and if pieces are sliced some rows of earlier micro-batches
(:mod:`.kv_cache`). One collective brings all rows that are read: an all-gather, or an all-to-all of
only the rows that are read, as the layout decides. Slices always use an all-gather of each rank's
runs of rows (:mod:`lightning_wlb.sharding.sliced_indices`). An index then puts keys in the order of
the segments, for all segments at once, so that one kernel call does the work. Backward scatter-adds
the gradients of these rows and sends them back the same way; their owners add them up. A single
rank sends nothing: several runs are joined by one copy, a single run needs none.

Half types are summed over segments in float32, and over ranks too unless a step asks for less
(:func:`.reduce_dtype`), so that a gradient depends on the number of ranks only by rounding. Every
rank of the group runs the same collectives, even a rank without tokens.

Cost: at most 2 · rows · kv_heads · head_dim elements sent to each rank, in forward and twice in
backward; earlier keys are sent once per slice. Keys that are read are meanwhile in memory, 1 + 1 /
(2·CP) times the micro-batch for shardings with one pair of chunks. Do not use it for groups across
slow links, where passing keys round a ring hides the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata
from lightning_wlb.distributed.collectives import (
    all_gather_into,
    reduce_dtype,
    reduce_scatter_into,
    sum_dtype,
)
from lightning_wlb.distributed.process_groups import group_size
from lightning_wlb.sharding.sliced_indices import OWN

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients, [rows, kv_heads, head_dim] each."""


class KeyMessages:
    """The messages of one layer and micro-batch: keys and values, then their gradients.

    Collective: every rank of the group sends, then receives.
    """

    def __init__(self, metadata: AttentionMetadata, group: ProcessGroup | None) -> None:
        self._metadata, self._group = metadata, group
        slices = metadata.slices
        self._gathered = metadata.gathered if slices is None else slices.rows
        self._runs: list[Pair] = []
        self._buffer: Tensor | None = None
        self._shares: Sequence[Tensor] = ()
        self._work: dist.Work | None = None

    def send(self, k: Tensor, v: Tensor) -> None:
        """Post this rank's own rows and its rows of earlier slices, once, without waiting."""
        if self._buffer is not None or self._runs:
            return
        metadata = self._metadata
        if metadata.slices is not None:
            cache, layer = metadata.slices.cache_and_layer
            self._runs = [
                (k[run.start : run.stop], v[run.start : run.stop])
                if run.micro_batch == OWN
                else cache.read(layer, run)
                for run in metadata.slices.runs
            ]
            if metadata.key_index is None:
                return
            local = k.new_empty(self._gathered, 2, *k.shape[1:])
            filled = local[: sum(len(keys) for keys, _ in self._runs)]
            for number, each in enumerate(zip(*self._runs, strict=True)):
                torch.cat(each, out=filled[:, number])
            self._runs = []
            self._buffer = k.new_empty(self._arriving, *local.shape[1:])
        else:
            # Own rows come after the rows that arrive.
            self._buffer = k.new_empty(self._arriving + len(k), 2, *k.shape[1:])
            local = self._buffer[self._arriving :]
            torch.stack((k, v), dim=1, out=local)
        arriving = self._buffer[: self._arriving]
        if self._gathered:
            sent = local[: self._gathered]
            self._work = all_gather_into(arriving, sent, group=self._group, async_op=True)
        elif metadata.send_index is not None:
            sent = local.index_select(0, metadata.send_index)
            counts = list(metadata.receive_counts), list(metadata.send_counts)
            self._work = dist.all_to_all_single(
                arriving, sent, *counts, group=self._group, async_op=True
            )

    def receive(self) -> Pair:
        """Keys and values of the segments in their order, [keys, kv_heads, head_dim] each."""
        runs, self._runs = self._runs, []
        if len(runs) == 1:
            return runs[0]
        if runs:
            keys, values = zip(*runs, strict=True)
            return torch.cat(keys), torch.cat(values)
        assert self._buffer is not None
        assert self._metadata.key_index is not None
        self._wait()
        both = self._buffer.index_select(0, self._metadata.key_index)
        self._buffer = None
        return both[:, 0], both[:, 1]

    def send_back(self, *gradients: Tensor) -> None:
        """Add up the gradients of each row that was read and post them to the rows' owners."""
        metadata = self._metadata
        if metadata.key_index is None:
            self._shares = gradients
            return
        own = metadata.rows if metadata.slices is None else 0
        like, dtype = gradients[0], sum_dtype(gradients[0].dtype)
        total = like.new_zeros(self._arriving + own, 2, *like.shape[1:], dtype=dtype)
        for number, each in enumerate(gradients):
            total[:, number].index_add_(0, metadata.key_index, each.to(dtype))
        self._buffer = total[self._arriving :]
        arriving = total[: self._arriving].to(reduce_dtype(like.dtype))
        if self._gathered:
            back = arriving.new_empty(self._gathered, *total.shape[1:])
            self._work = reduce_scatter_into(back, arriving, group=self._group, async_op=True)
        elif metadata.send_index is not None:
            back = arriving.new_empty(len(metadata.send_index), *total.shape[1:])
            counts = list(metadata.send_counts), list(metadata.receive_counts)
            self._work = dist.all_to_all_single(
                back, arriving, *counts, group=self._group, async_op=True
            )
        else:
            return
        self._shares = back.unbind(1)

    def receive_back(self) -> Iterable[Tensor]:
        """Gradients of this rank's keys and values from all ranks, [rows, kv_heads, head_dim]."""
        self._wait()
        shares, own, self._shares, self._buffer = self._shares, self._buffer, (), None
        slices, sent = self._metadata.slices, self._metadata.send_index
        if slices is not None:
            return _added(slices, self._metadata.rows, *shares)
        assert own is not None
        totals = own.unbind(1)
        for total, share in zip(totals, shares, strict=False):
            if sent is not None:
                total.index_add_(0, sent, share.to(total.dtype))
            else:
                total[: len(share)] += share
        return totals

    @property
    def _arriving(self) -> int:
        """Number of rows that arrive from the group; in an all-gather own rows are among them."""
        return group_size(self._group) * self._gathered + sum(self._metadata.receive_counts)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _added(slices: SliceMetadata, rows: int, of_keys: Tensor, of_values: Tensor) -> Pair:
    """Total gradients of this rank's own keys and values, for slices.

    They sum the parts from all ranks and the parts that later slices have left in the cache. The
    gradients of earlier slices' rows are left in the cache for the backward of those slices.
    """
    cache, layer = slices.cache_and_layer
    dtype = sum_dtype(of_keys.dtype)
    # The cached gradients may be changed in place: nothing else reads them any more.
    keys, values = cache.gradients_of(layer, slices.micro_batch) or (
        of_keys.new_zeros(rows, *of_keys.shape[1:], dtype=dtype),
        of_keys.new_zeros(rows, *of_keys.shape[1:], dtype=dtype),
    )
    first = 0
    for run in slices.runs:
        stop = first + run.stop - run.start
        if run.micro_batch == OWN:
            keys[run.start : run.stop] += of_keys[first:stop]
            values[run.start : run.stop] += of_values[first:stop]
        else:
            cache.add_gradients(layer, run, of_keys[first:stop], of_values[first:stop])
        first = stop
    return keys, values


class _Send(torch.autograd.Function):
    """Posts keys and values; backward waits for their gradients.

    Returns an empty tensor that connects it to :class:`_Receive` in the graph. The gradients stay
    in ``messages``: autograd would round gradients of a half-type tensor before they are summed
    over the segments and ranks that read a row.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, own: Pair, messages: KeyMessages) -> Tensor:
        ctx.messages, ctx.dtype = messages, k.dtype
        messages.send(*own)
        return k.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor) -> tuple[Any, ...]:
        return *(each.to(ctx.dtype) for each in ctx.messages.receive_back()), None, None


class _Receive(torch.autograd.Function):
    """Waits for keys and values and puts them in order; backward posts their gradients."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, messages: KeyMessages) -> Pair:
        ctx.messages = messages
        return messages.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.messages.send_back(*gradients)
        return gradients[0].new_empty(0), None


send: Callable[[Tensor, Tensor, Pair, KeyMessages], Tensor] = _Send.apply
"""Post ``own``, the detached ``k`` and ``v``; the result is for :func:`receive`."""

receive: Callable[[Tensor, KeyMessages], Pair] = _Receive.apply
"""Wait for the keys and values of the segments."""
