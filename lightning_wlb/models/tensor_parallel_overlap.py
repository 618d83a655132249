"""Overlaps matrix products with the messages of rows between tensor-parallel ranks.

Either half of a layer gathers rows, multiplies them by matrices that are split by columns, then
multiplies by a matrix that is split by rows, and sums and scatters. :class:`GatheredRows` does the
first two steps, :func:`summed_products` the others, and messages overlap products:

* *forward*: own rows are gathered, or sums scattered, in ``RowTravel.chunks`` parts. A part is
  multiplied while the next one is sent; rows are independent, so the results are the same;
* *backward*, as in Megatron-LM: only own rows are saved. They are gathered again while the gradient
  of the gathered rows is computed. This gradient is summed and scattered while the gradients of the
  weights are computed. A row-wise product's gradient is gathered in parts, like rows in forward.

Rows that backward has just recomputed are not gathered again, nor rows for frozen weights. Every
rank of a group posts the same operations in the same order. Sums are in :func:`.reduce_dtype`, part
by part in a fixed order, so repeated steps give the same bits.

Cost: a third more bytes gathered, and rows · dim elements more memory in the backward of a half
layer; it saves (1 - 1/TP) · rows · dim elements from forward to backward. For few rows, whose
products take less time than a message's latency, use one part, or ``RowTravel.chunks`` of 0, which
waits for every message. It has run only over gloo; NCCL would queue it on each group's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.distributed.collectives import all_gather_into, reduce_dtype, reduce_scatter_into
from lightning_wlb.distributed.process_groups import ProcessGroups, group_size
from lightning_wlb.models.tensor_parallel import gather_rows, scatter_rows


@dataclass(frozen=True)
class RowTravel:
    """How the rows of a micro-batch are sent between tensor-parallel ranks."""

    group: ProcessGroup | None = None  #: the tensor-parallel ranks; None for one rank
    chunks: int = 0  #: parts in which messages overlap products; 0: products wait for all rows
    keys_travel: bool = False  #: whether context-parallel ranks send keys beside queries' product

    @staticmethod
    def of(groups: ProcessGroups, rows: int) -> RowTravel:
        """How a micro-batch of ``rows`` rows on this rank is sent."""
        size = group_size(groups.tensor)
        chunks = groups.chunks(rows, size) if groups.chunks is not None and size > 1 else 0
        return RowTravel(groups.tensor, chunks, group_size(groups.context) > 1)


def row_parts(rows: int, chunks: int) -> list[slice]:
    """At most ``chunks`` consecutive parts of a rank's rows, none empty, as equal as possible."""
    parts = min(rows, chunks)
    return [slice(rows * n // parts, rows * (n + 1) // parts) for n in range(parts)]


class GatheredRows:
    """Rows of all ranks of a group, one rank after another, times matrices.

    Args:
        x: [rows, dim], equally shaped on every rank.
        weights: [columns, dim] each.
        kept: whether all rows are kept for backward, not only own ones: while backward recomputes.
    """

    def __init__(
        self, x: Tensor, weights: Sequence[Tensor], travel: RowTravel, kept: bool = False
    ) -> None:
        self._weights, self._kept = tuple(weights), kept
        self._group = travel.group
        self._behind = travel.chunks > 0 and group_size(travel.group) > 1 and len(x) > 0
        if not self._behind:
            self._all = gather_rows(x, travel.group)
            return
        # Set in forward, and again in backward. Only _Multiply saves the tensors that backward
        # needs, so that a checkpoint around it sees them.
        self._arriving: _Arriving | None = _Arriving(x.detach(), travel.group, travel.chunks)
        self._own: Tensor | None = x.detach()
        self._left: dict[int, Tensor] = {}  # products that no call has requested yet
        self._gradients: dict[int, Tensor] = {}
        self._token = _gather(x, self, *weights)

    def times(self, *numbers: int) -> tuple[Tensor, ...]:
        """The products with the weights of these numbers, [group size · rows, columns] each.

        Each number is requested once. Products that later calls request are computed here too while
        rows arrive; only their last part is left for later.
        """
        weights = [self._weights[number] for number in numbers]
        if not self._behind:
            return tuple(F.linear(self._all, weight) for weight in weights)
        products = _multiply(self._token, self, numbers, *(each.detach() for each in weights))
        if not self._left:
            self._weights, self._own, self._arriving = (), None, None
            del self._token
        return products


def summed_products(y: Tensor, weight: Tensor, travel: RowTravel) -> Tensor:
    """The sum over the ranks of ``y`` times a matrix; each rank gets its own rows.

    ``y`` [group size · rows, columns] on all ranks; ``weight`` [dim, columns]; gives [rows, dim].
    """
    size = group_size(travel.group)
    if travel.chunks == 0 or size == 1 or len(y) == 0 or len(y) % size:
        return scatter_rows(F.linear(y, weight), travel.group)
    return _sum(_hold(y, weight, travel), y.detach(), weight.detach(), travel)


class _Arriving:
    """Rows of all ranks, [ranks, rows, ...], which arrive part by part.

    With ``chunks`` of 0, ``x`` has the rows of all ranks, [ranks, rows, ...], and nothing is sent.
    """

    def __init__(self, x: Tensor, group: ProcessGroup | None, chunks: int) -> None:
        self._works: list[tuple[slice, dist.Work]] = []
        self._last = slice(None)
        if chunks == 0:
            self.rows = x
            return
        x = x.contiguous()
        self.rows = x.new_empty(dist.get_world_size(group), *x.shape)
        for part in row_parts(len(x), chunks):
            if chunks == 1:
                work = all_gather_into(self.rows.flatten(0, 1), x, group=group, async_op=True)
            else:
                into = [each[part] for each in self.rows]
                work = dist.all_gather(into, x[part], group=group, async_op=True)
            self._works.append((part, work))
            self._last = part

    def parts(self) -> Iterator[tuple[bool, slice]]:
        """Wait for each part of the rows; yields whether it is the last one, and its slice.

        When all parts have arrived, a second call yields only the last part.
        """
        works, self._works = self._works, []
        for part, work in works:
            work.wait()
            yield part == self._last, part
        if not works:
            yield True, self._last


class RowSums:
    """Sums over the ranks, [rows, ...], which arrive part by part.

    ``shape`` is the shape of each rank's summand, [ranks · rows, ...], and ``like`` has its dtype.
    """

    def __init__(self, like: Tensor, shape: Sequence[int], group: ProcessGroup | None) -> None:
        self._group, self._dtype, wide = group, like.dtype, reduce_dtype(like.dtype)
        self._ranks = dist.get_world_size(group)
        self._sums = like.new_empty(shape[0] // self._ranks, *shape[1:], dtype=wide)
        self._works: list[tuple[dist.Work, Tensor]] = []

    def post(self, part: slice, share: Tensor) -> None:
        """Add this rank's summand, [ranks · rows of the part, ...]."""
        sent = share.to(self._sums.dtype).contiguous()
        work = reduce_scatter_into(self._sums[part], sent, group=self._group, async_op=True)
        self._works.append((work, sent))

    def arrived(self) -> Tensor:
        """Wait for all parts; returns the sums."""
        for work, _ in self._works:
            work.wait()
        return self._sums.to(self._dtype)


def _times(rows: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
    """[ranks, rows, n] times [n, m] into [ranks, rows, m]; works on views, without copies."""
    return torch.bmm(rows, matrix.expand(len(rows), *matrix.shape), out=out)


class _Gather(torch.autograd.Function):
    """An empty stand-in for the gathered rows; its backward runs after all products' backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: GatheredRows, *weights: Tensor) -> Tensor:
        ctx.rows = rows
        return x.new_empty(()).expand(group_size(rows._group) * len(x), *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        needs_x, _, *needed = ctx.needs_input_grad
        rows: GatheredRows = ctx.rows
        sums = None
        if needs_x:
            sums = RowSums(gradient, gradient.shape, rows._group)
            sums.post(slice(None), gradient)
        gathered: Tensor | None = None
        if rows._arriving is not None:
            for _ in rows._arriving.parts():
                pass
            gathered = rows._arriving.rows.flatten(0, 1)
        of_weights = [
            rows._gradients[number].t() @ gathered if gathered is not None and each else None
            for number, each in enumerate(needed)
        ]
        rows._gradients, rows._arriving = {}, None
        return None if sums is None else sums.arrived(), None, *of_weights


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: GatheredRows, numbers: Sequence[int], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.numbers = rows, numbers
        ctx.trained = any(each.requires_grad for each in rows._weights)
        arriving, own = rows._arriving, rows._own
        assert arriving is not None
        if not rows._left:
            rows._left = {
                number: token.new_empty(*arriving.rows.shape[:2], len(weight))
                for number, weight in enumerate(rows._weights)
            }
        later = [number for number in rows._left if number not in numbers]
        for last, part in arriving.parts():
            for number in (*numbers, *([] if last else later)):
                weight, product = rows._weights[number].detach(), rows._left[number]
                _times(arriving.rows[:, part], weight.t(), product[:, part])
        products = tuple(rows._left.pop(number).flatten(0, 1) for number in numbers)
        ctx.save_for_backward(arriving.rows if rows._kept else own, *weights)
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved, *weights = ctx.saved_tensors
        rows: GatheredRows = ctx.rows
        rows._gradients.update(zip(ctx.numbers, gradients, strict=True))
        if ctx.trained and rows._arriving is None:
            # Start gathering the rows again, once.
            rows._arriving = _Arriving(saved, rows._group, 0 if rows._kept else 1)
        total = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            total.addmm_(gradient, weight)
        return total, None, None, *(None for _ in weights)


class _Hold(torch.autograd.Function):
    """Saves the input and the weight that a summed product's backward needs.

    It is a separate node before :class:`_Sum`. A checkpoint recomputes only until all tensors are
    saved that backward needs, so it does not multiply and send again.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, travel: RowTravel) -> Tensor:
        ctx.travel = travel
        ctx.save_for_backward(y, weight)
        return y.new_empty(()).expand(len(y) // group_size(travel.group), len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        y, weight = ctx.saved_tensors
        arriving = _Arriving(gradient, ctx.travel.group, ctx.travel.chunks)
        size, rows = arriving.rows.shape[:2]
        of_y = y.new_empty(size, rows, y.shape[1])
        for _, part in arriving.parts():
            if ctx.needs_input_grad[0]:
                _times(arriving.rows[:, part], weight, of_y[:, part])
        of_weight = arriving.rows.flatten(0, 1).t() @ y if ctx.needs_input_grad[1] else None
        return of_y.flatten(0, 1), of_weight, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, y: Tensor, weight: Tensor, travel: RowTravel) -> Tensor:
        size = group_size(travel.group)
        sums, parts = RowSums(y, (len(y), len(weight)), travel.group), y.view(size, -1, y.shape[1])
        for part in row_parts(parts.shape[1], travel.chunks):
            share = parts[:, part]
            product = y.new_empty(size, share.shape[1], len(weight))
            sums.post(part, _times(share, weight.t(), product).flatten(0, 1))
        return sums.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None, None, None


_gather: Callable[..., Tensor] = _Gather.apply
_multiply: Callable[..., tuple[Tensor, ...]] = _Multiply.apply
_hold: Callable[..., Tensor] = _Hold.apply
_sum: Callable[..., Tensor] = _Sum.apply
