"""Keys and values that backward fetches a second time instead of keeping them (*refetch*).

A kernel saves the keys and values that it read for its backward. Under context parallelism they
are those of whole prefixes, about CP times what the rank itself holds, in every layer; for sliced
pieces they are more. Here autograd saves a number in their place (``saved_tensors_hooks``, so it
works for every kernel). Backward fetches them right before the kernel's backward, outside of what
is timed as attention, and frees them right after it.

Fetching may be collective: it happens once in the backward of every rank, with or without queries.

Cost: one more exchange of keys, in backward. Not inside a checkpoint that recomputes the whole
layer: the checkpoint's own hooks would no longer see what the kernel saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks


def attend_with_refetch(
    attend: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    fetch: Callable[[], Iterable[Tensor]],
) -> Tensor:
    """``attend(keys, values)``, whose backward takes both from ``fetch()``.

    Args:
        attend: attention of fixed queries over keys and values.
        keys: [keys, kv_heads, head_dim].
        values: [keys, kv_heads, head_dim].
        fetch: gives tensors equal to ``keys`` and ``values``; called in backward, without grad.
    """
    number_of = {(each.data_ptr(), each.shape): n for n, each in enumerate((keys, values))}
    fetched: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor | int:
        return number_of.get((tensor.data_ptr(), tensor.shape), tensor)

    def unpack(saved: Tensor | int) -> Tensor:
        return fetched[saved] if isinstance(saved, int) else saved

    def refetch() -> None:
        with torch.no_grad():
            fetched[:] = fetch()

    keys, values = call_in_backward(fetched.clear, keys, values)
    with saved_tensors_hooks(pack, unpack):
        out = attend(keys, values)
    (out,) = call_in_backward(refetch, out)
    return out


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
