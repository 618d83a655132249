"""Analytic FLOPs of a decoder from its shape: the W_a and W_l of WLB-LLM Equation 2.

A causal decoder does work of two kinds on a piece of d tokens: the matrix products, which are
linear in d, and attention, which grows with the number of (query, key) pairs: d·(d + 1)/2, or
under a sliding window of W tokens W·d - W·(W - 1)/2 from d = W on. Both are exact Python integers,
so that every rank ranks pieces alike on any CPU.

Conventions: one multiply-add is 2 FLOPs; only matrix products count (norms, rotary embedding,
activation functions and the embedding look-up are bound by memory, not by arithmetic); masked
pairs do not count, as variable-length attention kernels skip them. The backward of a matrix
product is two products (×2); the backward of attention recomputes the scores and does four more
products where the forward does two (×2.5).

Every call is O(1). Do not use FLOPs as a latency: a short piece runs far below the arithmetic peak
of a device, which only :mod:`~lightning_wlb.cost.latency` knows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import isqrt

from lightning_wlb.arguments import whole


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that its FLOPs depend on.

    Args:
        dim: width of the residual stream.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: key and value heads (grouped-query attention where fewer than ``heads``).
        head_dim: width of one head.
        ffn_dim: hidden width of the gated feed-forward network (three matrices).
        vocab_size: rows of the output projection; 0 leaves the output projection out.
        sliding_window: most keys that a query sees, its own included; None for no bound.

    Raises:
        ValueError: a size is not a whole number of at least 1 (``vocab_size``: 0), or ``heads`` is
            not a multiple of ``kv_heads``.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "sliding_window" and self.sliding_window is None:
                continue
            least = 0 if field.name == "vocab_size" else 1
            size = whole(f"ModelShape: {field.name}", getattr(self, field.name), least)
            object.__setattr__(self, field.name, size)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"ModelShape: heads={self.heads} is not a multiple of kv_heads={self.kv_heads};"
                " every key/value head serves the same number of query heads."
            )


def causal_pairs(tokens: int, context: int = 0, sliding_window: int | None = None) -> int:
    """(query, key) pairs of ``tokens`` new tokens that follow ``context`` tokens of their piece.

    With a ``sliding_window``, only so many last keys of a query count.
    """
    if sliding_window is None:
        return tokens * context + tokens * (tokens + 1) // 2
    # Queries from position W on miss the keys that they would see without a window.
    missed = max(context + tokens - sliding_window, 0)
    before = max(context - sliding_window, 0)
    return causal_pairs(tokens, context) - causal_pairs(missed) + causal_pairs(before)


def layer_linear_flops(shape: ModelShape, tokens: int) -> int:
    """Forward FLOPs of the matrix products of one layer, attention scores left out."""
    attention = shape.dim * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    feed_forward = 3 * shape.dim * shape.ffn_dim
    return 2 * tokens * (attention + feed_forward)


def head_flops(shape: ModelShape, tokens: int) -> int:
    """Forward FLOPs of the output projection onto the vocabulary."""
    return 2 * tokens * shape.dim * shape.vocab_size


def linear_flops(shape: ModelShape, tokens: int) -> int:
    """Forward FLOPs of everything linear in tokens: all layers and the output projection."""
    return shape.layers * layer_linear_flops(shape, tokens) + head_flops(shape, tokens)


def attention_flops(shape: ModelShape, tokens: int, context: int = 0) -> int:
    """Forward FLOPs of causal attention in all layers: two products over every pair."""
    pairs = causal_pairs(tokens, context, shape.sliding_window)
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


@dataclass(frozen=True)
class PassWork:
    """Work of a forward or backward pass as data; calling it gives the work of a slice.

    Work is an integer in the unit of the coefficients. That of the slices of a piece adds up to
    that of the piece.

    Args:
        per_token: work of a token, at least 1.
        per_pair: work of a query and a key that it sees, at least 0.
        window: most keys that a query sees, its own included; None for no bound.

    Raises:
        ValueError: a coefficient out of range.
    """

    per_token: int
    per_pair: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("per_token", 1), ("per_pair", 0), ("window", 1)):
            if (value := getattr(self, name)) is not None or name != "window":
                object.__setattr__(self, name, whole(name, value, least))

    def __call__(self, tokens: int, context: int = 0) -> int:
        """Work of ``tokens`` tokens that follow ``context`` tokens of the same piece."""
        pairs = causal_pairs(tokens, context, self.window)
        return self.per_token * tokens + self.per_pair * pairs

    def __add__(self, other: PassWork) -> PassWork:
        """The work of both passes."""
        assert self.window == other.window, "passes of one model have one window"
        return PassWork(
            self.per_token + other.per_token, self.per_pair + other.per_pair, self.window
        )

    def tokens_within(self, work: int) -> int:
        """How many first tokens of a piece have at most ``work`` together, exactly.

        Within the window work is quadratic in tokens; beyond it every token sees as many keys.
        """
        if self.window is not None and work >= (inside := self(self.window)):
            return self.window + (work - inside) // (self.per_token + self.per_pair * self.window)
        if self.per_pair == 0:
            return work // self.per_token
        linear = 2 * self.per_token + self.per_pair
        root = isqrt(linear * linear + 8 * self.per_pair * work)
        return (root - linear) // (2 * self.per_pair)


@dataclass(frozen=True)
class Work:
    """Work of a model on slices, W_l + W_a of WLB-LLM Equation 2, recomputation left out."""

    forward: PassWork
    backward: PassWork

    @cached_property
    def total(self) -> PassWork:
        """The work of both passes, which packings balance."""
        return self.forward + self.backward

    @staticmethod
    def of(shape: ModelShape) -> Work:
        """The FLOPs of a model; backward has twice the linear and 2.5 times the attention work."""
        linear = linear_flops(shape, 1)
        pair = 4 * shape.layers * shape.heads * shape.head_dim
        return Work(
            PassWork(linear, pair, shape.sliding_window),
            PassWork(2 * linear, 5 * pair // 2, shape.sliding_window),
        )
