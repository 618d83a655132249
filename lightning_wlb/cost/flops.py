"""Analytic FLOPs of a decoder from its shape: the W_a and W_l of WLB-LLM Equation 2.

A causal decoder does work of two kinds on a piece of d tokens: the matrix products, which are
linear in d, and attention, which grows with the number of (query, key) pairs: d·(d + 1)/2, or under
a sliding window of W tokens W·d - W·(W - 1)/2 from d = W on. Both are exact Python integers, so
that pieces compare alike on every rank and CPU. Layers may differ in both (:mod:`.shape`).

Conventions: one multiply-add is 2 FLOPs; only matrix products count (norms, rotary embedding,
activation functions and the embedding look-up are bound by memory); masked pairs do not count, as
variable-length attention kernels skip them; in a mixture only the experts count to which a token is
sent. The backward of a matrix product is two products (×2); the backward of attention recomputes
the scores and does four more products, the forward two (×2.5 if values are as wide as keys).

A call costs O(distinct windows of the layers), one or two in every known model. Do not use FLOPs as
a latency: a short piece runs far below the arithmetic peak of a device. Only
:mod:`~lightning_wlb.cost.latency` models that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.shape import LayerShape, ModelShape, window_width


def causal_pairs(tokens: int, context: int = 0, sliding_window: int | None = None) -> int:
    """(query, key) pairs of ``tokens`` new tokens that follow ``context`` tokens of their piece.

    With a ``sliding_window``, a query sees only its last so many keys, its own included.
    """
    if sliding_window is None:
        return tokens * context + tokens * (tokens + 1) // 2
    # Queries from position W on miss the keys that they would see without a window.
    missed = max(context + tokens - sliding_window, 0)
    before = max(context - sliding_window, 0)
    return causal_pairs(tokens, context) - causal_pairs(missed) + causal_pairs(before)


def layer_linear_flops(layer: LayerShape, tokens: int) -> int:
    """Forward FLOPs of one layer's matrix products and recurrence, attention scores left out."""
    across = layer.recurrence.flops if layer.recurrence else 0
    return tokens * (2 * (layer.attention_parameters + layer.feed_forward_parameters) + across)


def layer_attention_flops(layer: LayerShape, tokens: int, context: int = 0) -> int:
    """Forward FLOPs of causal attention in one layer: two products over every pair."""
    return _forward_pair(layer) * causal_pairs(tokens, context, layer.sliding_window)


def head_flops(shape: ModelShape, tokens: int) -> int:
    """Forward FLOPs of the output projection onto the vocabulary."""
    return 2 * tokens * shape.dim * shape.vocab_size


def linear_flops(shape: ModelShape, tokens: int) -> int:
    """Forward FLOPs of everything linear in tokens: all layers and the output projection."""
    layers = sum(count * layer_linear_flops(layer, tokens) for layer, count in shape.kinds.items())
    return layers + head_flops(shape, tokens)


def attention_flops(shape: ModelShape, tokens: int, context: int = 0) -> int:
    """Forward FLOPs of causal attention in all layers."""
    return sum(
        count * layer_attention_flops(layer, tokens, context)
        for layer, count in shape.kinds.items()
    )


def _forward_pair(layer: LayerShape) -> int:
    """FLOPs of a query and a key that it sees: the score, and adding the weighted value."""
    return layer.attends * 2 * layer.heads * (layer.head_dim + layer.value_dim)


def _backward_pair(layer: LayerShape) -> int:
    """Backward FLOPs of such a pair: its score again; gradients of query, key, score and value."""
    return 2 * layer.heads * (3 * layer.head_dim + 2 * layer.value_dim)


class _Stretch(NamedTuple):
    """Tokens of a piece over which the same windows are full, so that work is quadratic."""

    start: int  # tokens of the piece before the stretch
    first: int  # work of the stretch's first token
    per_pair: int  # how much more work each token has than the one before

    def work(self, tokens: int) -> int:
        """Work of the stretch's first ``tokens`` tokens."""
        return tokens * self.first + self.per_pair * (tokens * (tokens - 1) // 2)

    def tokens_within(self, work: int) -> int:
        """How many first tokens of the stretch have at most ``work`` together, exactly."""
        if self.per_pair == 0:
            return work // self.first
        linear = 2 * self.first - self.per_pair
        root = isqrt(linear * linear + 8 * self.per_pair * work)
        return (root - linear) // (2 * self.per_pair)


@dataclass(frozen=True)
class PassWork:
    """Work of a forward or backward pass as data; calling it gives the work of a slice.

    Work is an integer in the unit of the coefficients. The work of slices adds up to their piece's.

    Args:
        per_token: work of a token, at least 1.
        per_pair: work of a query and a key that it sees, at least 0, in layers of widest window.
        window: most keys that a query sees in these layers, its own included; None for no bound.
        narrower: (window, per_pair) of the layers of narrower windows, ascending and each below
            ``window``; :meth:`of_windows` sorts them.
    """

    per_token: int
    per_pair: int
    window: int | None = None
    narrower: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of_windows(per_token: int, per_pair: Mapping[int | None, int]) -> PassWork:
        """The pass with this work per pair in the layers of each window; None is no bound."""
        *narrower, (window, widest) = sorted(
            per_pair.items(), key=lambda each: window_width(each[0])
        )
        return PassWork(per_token, widest, window, tuple(narrower))  # type: ignore[arg-type]

    @cached_property
    def windows(self) -> dict[int | None, int]:
        """Work per pair of each window, from narrow to wide; None is no bound."""
        return {**dict(self.narrower), self.window: self.per_pair}

    def __call__(self, tokens: int, context: int = 0) -> int:
        """Work of ``tokens`` tokens that follow ``context`` tokens of the same piece."""
        pairs = causal_pairs(tokens, context, self.window)
        work = self.per_token * tokens + self.per_pair * pairs
        for window, per_pair in self.narrower:
            work += per_pair * causal_pairs(tokens, context, window)
        return work

    def of_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """The work of whole pieces of these lengths, rounded to float64."""
        tokens = lengths.astype(np.float64)
        work = self.per_token * tokens
        for window, per_pair in self.windows.items():
            missed = np.maximum(tokens - window_width(window), 0)
            work += per_pair * (tokens * (tokens + 1) - missed * (missed + 1)) / 2
        return work

    def __add__(self, other: PassWork) -> PassWork:
        """The work of both passes."""
        assert self.windows.keys() == other.windows.keys(), "passes of one model have its windows"
        windows = {window: each + other.windows[window] for window, each in self.windows.items()}
        return PassWork.of_windows(self.per_token + other.per_token, windows)

    def tokens_within(self, work: int) -> int:
        """How many first tokens of a piece have at most ``work`` together, exactly."""
        before, stretches = self._stretches
        place = bisect_right(before, work) - 1 if len(before) > 1 else 0
        stretch = stretches[place]
        return stretch.start + stretch.tokens_within(work - before[place])

    @cached_property
    def _stretches(self) -> tuple[list[int], list[_Stretch]]:
        """Stretches of a piece between the windows, and the work before each."""
        rising = sum(self.windows.values())
        stretches = [_Stretch(0, self.per_token + rising, rising)]
        before = [0]
        for window, per_pair in self.windows.items():
            if window is None:
                continue
            last = stretches[-1]
            tokens = window - last.start
            # The first token past the window sees as many keys as the token before.
            rising -= per_pair
            first = last.first + last.per_pair * (tokens - 1) + rising
            before.append(before[-1] + last.work(tokens))
            stretches.append(_Stretch(window, first, rising))
        return before, stretches


@dataclass(frozen=True)
class Work:
    """Work of a model on slices, W_l + W_a of WLB-LLM Equation 2, without recomputation.

    The number of ranks that share a micro-batch must divide ``recurrent_heads``, unless it is 0.
    """

    forward: PassWork
    backward: PassWork
    recurrent_heads: int = 0

    @cached_property
    def total(self) -> PassWork:
        """The work of both passes, which packings balance."""
        return self.forward + self.backward

    @staticmethod
    def of(shape: ModelShape) -> Work:
        """A model's FLOPs; backward has twice the linear and 2.5 times the attention work."""
        linear = linear_flops(shape, 1)

        def of_pass(per_token: int, per_pair: Callable[[LayerShape], int]) -> PassWork:
            windows: dict[int | None, int] = defaultdict(int)
            for layer, count in shape.kinds.items():
                if layer.attends:
                    windows[layer.sliding_window] += count * per_pair(layer)
            return PassWork.of_windows(per_token, windows or {None: 0})

        return Work(
            of_pass(linear, _forward_pair),
            of_pass(2 * linear, _backward_pair),
            shape.recurrent_heads,
        )
