"""A function call at a given place of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def call_in_backward(call: Callable[[], object], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, as views; ``call`` runs when the gradients of all of them are there.

    Around the output of an operation it runs before the operation's own backward, around its
    inputs after it. It does not run where no tensor requires a gradient.
    """
    result: tuple[Tensor, ...] = _CallInBackward.apply(call, *tensors)
    return result


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], object], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.call()
        return None, *gradients
