"""Computes gradients of weights while a block's last message is sent, in unchanged modules.

The backward of a block of a family's own modules ends by summing the gradients of its rows over the
tensor-parallel ranks. The earlier layers wait only for that sum, and nothing in the block does. So
the block's linear layers (``nn.Linear``, whatever the family computes in between) do not compute
the gradients of their trained weights until the sum has been posted. :func:`gather_late` gathers a
block's rows before the block, so its backward runs last; there it computes these gradients.

Cost: the inputs of these layers and the gradients of their outputs are held until the block's
backward ends, which is less than the block held when its backward began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_wlb.distributed.collectives import all_gather
from lightning_wlb.models.tensor_parallel_overlap import RowSums

_LATE = "_late_gradients"  # key in a linear layer's __dict__, for its forward


def gather_late(x: Tensor, group: ProcessGroup, layers: Sequence[nn.Linear]) -> Tensor:
    """The rows of all ranks, [group size · rows, dim], for a block of linear layers.

    It gathers like :func:`.gather_rows`. Its backward posts the sum of the rows' gradients, then
    computes those of the layers' trained weights. The layers' forward must be :func:`late_linear`.
    """
    trained = [each for each in layers if each.weight.requires_grad]
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in trained]
    for layer, of_layer in zip(trained, kept, strict=True):
        layer.__dict__[_LATE] = of_layer
    return _gather(x, group, kept, *(each.weight for each in trained))


def forget_late(layers: Sequence[nn.Linear]) -> None:
    """Let layers compute gradients in the usual order from now on."""
    for each in layers:
        each.__dict__.pop(_LATE, None)


def late_linear(self: nn.Linear, input: Tensor) -> Tensor:
    """The forward of ``nn.Linear``, which leaves the weight's gradient to :func:`gather_late`."""
    kept = self.__dict__.get(_LATE)
    if kept is None or not input.requires_grad:
        return F.linear(input, self.weight, self.bias)
    return _multiply(input, self.weight.detach(), self.bias, kept)


class _GatherLate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, kept: Any, *weights: Tensor) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sums = None
        if ctx.needs_input_grad[0]:
            sums = RowSums(gradient, gradient.shape, ctx.group)
            sums.post(slice(None), gradient)
        of_weights: list[Tensor | None] = []
        for of_layer in ctx.kept:
            shares = [share.flatten(0, -2).t() @ rows.flatten(0, -2) for share, rows in of_layer]
            of_weights.append(sum(shares[1:], shares[0]) if shares else None)
            of_layer.clear()
        return None if sums is None else sums.arrived(), None, None, *of_weights


class _MultiplyLate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.kept = kept
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.kept.append((gradient, x))
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight, None, of_bias, None


_gather: Callable[..., Tensor] = _GatherLate.apply
_multiply: Callable[..., Tensor] = _MultiplyLate.apply
