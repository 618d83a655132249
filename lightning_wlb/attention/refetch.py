"""Keys and values that backward puts together again instead of keeping them.

A kernel saves the keys and values it read for its backward. Under context parallelism they are
those of whole prefixes, about CP times what the rank itself holds, in every layer; for sliced
pieces more. Here autograd saves a reference in their place (``saved_tensors_hooks``, so it works
for every kernel), and backward reads them again from what the ranks hold themselves: right before
the kernel's backward, outside of what is timed as attention, and freed right after it.

Reading may be collective: it runs once in the backward of every rank, whether or not the rank has
queries and a kernel.

Cost: the exchange of keys once more, in backward. Not inside a checkpoint that runs the whole
layer again: its own hooks would no longer see what the kernel saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks


def attend_reading_again(
    attend: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    read: Callable[[], tuple[Tensor, Tensor]],
) -> Tensor:
    """``attend(keys, values)``, whose backward takes them from ``read()``.

    Args:
        attend: attention of fixed queries over keys and values.
        keys: [keys, kv_heads, head_dim].
        values: as keys.
        read: gives equal tensors, in backward.
    """
    again = _Again(keys, values, read)
    keys, values = _release_in_backward(again, keys, values)
    with saved_tensors_hooks(again.pack, again.unpack):
        out = attend(keys, values)
    return _fetch_in_backward(again, out)


class _Again:
    def __init__(
        self, keys: Tensor, values: Tensor, read: Callable[[], tuple[Tensor, Tensor]]
    ) -> None:
        self._places = {(each.data_ptr(), each.shape): n for n, each in enumerate((keys, values))}
        self._read = read
        self._fetched: tuple[Tensor, Tensor] | None = None

    def pack(self, tensor: Tensor) -> Tensor | int:
        """A number in place of the keys or values; any other tensor as it is."""
        return self._places.get((tensor.data_ptr(), tensor.shape), tensor)

    def unpack(self, saved: Tensor | int) -> Tensor:
        """What was packed."""
        if not isinstance(saved, int):
            return saved
        assert self._fetched is not None
        return self._fetched[saved]

    def fetch(self) -> None:
        """Read again."""
        with torch.no_grad():
            self._fetched = self._read()

    def release(self) -> None:
        """The kernel's backward has run."""
        self._fetched = None


class _FetchInBackward(torch.autograd.Function):
    """Identity on the output; in backward it runs before the kernel's own backward."""

    @staticmethod
    def forward(ctx: Any, again: _Again, out: Tensor) -> Tensor:
        ctx.again = again
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.again.fetch()
        return None, gradient


class _ReleaseInBackward(torch.autograd.Function):
    """Identity on the inputs; in backward it runs once the kernel's gradients are there."""

    @staticmethod
    def forward(ctx: Any, again: _Again, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.again = again
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Any, ...]:
        ctx.again.release()
        return None, grad_keys, grad_values


_fetch_in_backward: Callable[..., Tensor] = _FetchInBackward.apply
_release_in_backward: Callable[..., tuple[Tensor, Tensor]] = _ReleaseInBackward.apply
