"""Analytic FLOPs of a decoder from its shape: the W_a and W_l of WLB-LLM Equation 2.

A causal decoder spends work of two kinds on a piece of d tokens: the matrix products, which are
linear in d, and attention, which grows with the number of (query, key) pairs: d·(d + 1)/2, or
under a sliding window of W tokens W·d - W·(W - 1)/2 from d = W on. Both are exact Python integers
here, so that every rank ranks pieces alike on any CPU.

Conventions: one multiply-add is 2 FLOPs; only matrix products count (norms, rotary embedding,
activation functions and the embedding look-up are bound by memory, not by arithmetic); masked
pairs do not count, as variable-length attention kernels skip them. The backward of a matrix
product is two products (×2); the backward of attention recomputes the scores and does four more
products where the forward does two (×2.5).

Cost: O(1) integer operations per call. Not to be used as a latency: a short piece runs far below
the arithmetic peak of a device, and this model does not know it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
        ValueError: a size that is no whole number, or below 1 (``vocab_size`` below 0), or
            ``heads`` not a multiple of ``kv_heads``.
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

    Of a query's keys only the last ``sliding_window`` count, where there is one.
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
class Work:
    """FLOPs of a slice of ``tokens`` tokens that follow ``context`` tokens of the same piece.

    W_l + W_a of WLB-LLM Equation 2, forward and backward apart. Recomputation under activation
    checkpointing is not in it.
    """

    shape: ModelShape

    def forward(self, tokens: int, context: int = 0) -> int:
        """FLOPs of the forward pass."""
        return linear_flops(self.shape, tokens) + attention_flops(self.shape, tokens, context)

    def backward(self, tokens: int, context: int = 0) -> int:
        """FLOPs of the backward pass: linear ×2, attention ×2.5 (exact, the latter is even)."""
        attention = attention_flops(self.shape, tokens, context)
        return 2 * linear_flops(self.shape, tokens) + 5 * attention // 2

    def total(self, tokens: int, context: int = 0) -> int:
        """FLOPs of forward and backward, which is what the packer balances."""
        return self.forward(tokens, context) + self.backward(tokens, context)
