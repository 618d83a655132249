"""Keys and values between forward and backward: cached for later slices, or refetched.

*Cache.* The forward of a slice reads the keys and values that the earlier slices of its piece left
here, each on the ranks that computed them. Backwards run in reverse order of slices. A slice's
backward leaves the gradients of those keys here, summed in float32 (float64 in float64 runs), and
the earlier slice's own backward takes them.

Cost: the keys and values of micro-batches whose pieces have later slices, from their forward to
their backward, and as much again in the wide dtype once there are gradients. The keys and values
are aliases of tensors that autograd keeps anyway, except under activation checkpointing.

*States.* A recurrence leaves its state at a slice's end in the same way, and the next slice's
backward leaves the state's gradient (:class:`RecurrentStates`).

*Refetch.* A kernel saves for its backward all keys and values that it read, of whole prefixes.
:func:`attend_with_refetch` lets autograd save a number in their place (``saved_tensors_hooks``, so
it works for every kernel). Keys and values are fetched again right before the kernel's backward,
outside the time that counts as attention, and freed right after it. Fetching may be collective: it
happens once in the backward of every rank, with or without queries.

Cost: one more exchange of keys, in backward. Do not use it inside a checkpoint that recomputes the
whole layer: the checkpoint's own hooks would no longer see the tensors that the kernel saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from lightning_wlb.distributed.collectives import sum_dtype
from lightning_wlb.sharding.sliced_indices import Run

State = tuple[Tensor, ...]
"""The state that a recurrence passes from a slice of a piece to the next."""


class KeyValueCache:
    """Keys and values by (layer, micro-batch), for one step of one rank.

    A single backward of a step's summed loss is correct too: autograd goes through the slices of a
    piece in reverse, since it visits the operation that was computed last first.

    Attributes:
        states: the states that recurrences pass from slice to slice.
        gradients: the gradients that later slices have left.
    """

    def __init__(self) -> None:
        self.states = RecurrentStates()
        self.gradients: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def put(self, layer: int, micro_batch: int, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values, [rows, kv_heads, head_dim]; recomputation changes nothing."""
        self._pairs.setdefault((layer, micro_batch), (keys, values))

    def read(self, layer: int, run: Run) -> tuple[Tensor, Tensor]:
        """Views of some rows of the keys and values of an earlier micro-batch."""
        keys, values = self._pairs[layer, run.micro_batch]
        return keys[run.start : run.stop], values[run.start : run.stop]

    def add_gradients(self, layer: int, run: Run, grad_keys: Tensor, grad_values: Tensor) -> None:
        """Leave the gradients of some rows for their owner's backward."""
        place, dtype = (layer, run.micro_batch), sum_dtype(grad_keys.dtype)
        assert place in self._pairs, "a slice's backward runs before those of earlier ones"
        if place not in self.gradients:
            keys, values = (torch.zeros_like(each, dtype=dtype) for each in self._pairs[place])
            self.gradients[place] = keys, values
        for total, share in zip(self.gradients[place], (grad_keys, grad_values), strict=True):
            total[run.start : run.stop] += share

    def gradients_of(self, layer: int, micro_batch: int) -> tuple[Tensor, Tensor] | None:
        """Take the gradients for the owner's backward; frees the keys, which none reads later."""
        self._pairs.pop((layer, micro_batch), None)
        return self.gradients.pop((layer, micro_batch), None)

    def drop(self, micro_batch: int, layers: Iterable[int]) -> None:
        """Free a micro-batch whose backward has run."""
        for layer in layers:
            self._pairs.pop((layer, micro_batch), None)


def attend_with_refetch(
    attend: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    fetch: Callable[[], Iterable[Tensor]],
) -> Tensor:
    """``attend(keys, values)``, whose backward takes both from ``fetch()``.

    Args:
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
    """The tensors as views; in backward ``call`` runs once the gradients of all of them are known.

    Around an operation's output, ``call`` runs before the operation's own backward; around its
    inputs, after it. It does not run if no tensor requires a gradient.
    """
    return _CallInBackward.apply(call, *tensors)


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


class RecurrentStates:
    """States at the ends of slices, for one step of one rank.

    Attributes:
        held: the states, detached.
        gradients: the gradients that later slices have left for the states.
    """

    def __init__(self) -> None:
        self.held: dict[Any, State] = {}
        self.gradients: dict[Any, State] = {}

    def leave(self, key: Any, out: Tensor, state: State) -> Tensor:
        """Keep ``state`` for the next slice, and return ``out`` with the state's gradient attached.

        In backward the gradient that the next slice left for the state joins that of ``out``.
        """
        return _Left.apply(out, self, key, *state)

    def take(self, key: Any, anchor: Tensor) -> State:
        """The state that the previous slice has left, put into the autograd graph of ``anchor``."""
        return _Taken.apply(anchor, self, key)


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, states: RecurrentStates, key: Any, *state: Tensor) -> Tensor:
        ctx.states, ctx.key, ctx.count = states, key, len(state)
        # If the layer is being recomputed, it has kept the state already.
        states.held.setdefault(key, tuple(each.detach() for each in state))
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.states.held.pop(ctx.key, None)
        of_state = ctx.states.gradients.pop(ctx.key, (None,) * ctx.count)
        return gradient, None, None, *of_state


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, states: RecurrentStates, key: Any) -> State:
        ctx.states, ctx.key = states, key
        return tuple(each.clone() for each in states.held[key])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        # Copies, since a gradient may be a view of a gradient of all rows.
        ctx.states.gradients[ctx.key] = tuple(each.clone() for each in gradients)
        return None, None, None
