"""Time that layers wait for messages of rows and of keys, which overlap matrix products.

:mod:`lightning_wlb.models.tensor_parallel_overlap` says which products overlap messages of rows
between tensor-parallel ranks, :mod:`lightning_wlb.attention.packed` which overlap messages of keys
between context-parallel ranks. Here a message and the products beside it take as long as the longer
of both, and a message slows the products down (``Profile.slowed_beside``). If rows are sent in n
equal parts, the first message and the last product have nothing beside them, or the first product
and the last message. Keys are sent in one part. Element-wise work and attention hide nothing.

The rows of short micro-batches are sent in one part, since more parts would take little but
launches and hops; so are all rows if links are so fast that waits are short (:func:`chunks_of`).

Cost: some microseconds; times are remembered by rows. Do not use it for messages that share a link
at the same time, such as keys and rows in a node, or messages and parameters between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightning_wlb.cost.shape import LayerShape

if TYPE_CHECKING:
    from lightning_wlb.cost.latency import LatencyModel

Overlap = Literal["off", "late", "all"]
"""Which messages overlap products: none; the sum of a half layer's gradients of rows, beside its
gradients of weights (Hugging Face blocks); all messages of rows and keys."""

MOST_CHUNKS = 4
"""Parts beyond four hide little more, and each has fewer rows for its products."""

LEAST_GAIN = 0.0025
"""More parts must save this share of a layer's products: over loopback, where 0.2 % could be saved,
four parts made a forward 1.026 times as long, one part 1.003 (benchmarks/results/overlap.md)."""

ROWS_OF_A_PART = 1024
"""Rows of a part, over all ranks, without a device profile. Chosen, not measured."""


class HalfLayer(NamedTuple):
    """Shares of a layer's products that belong to its attention or its feed-forward half."""

    into: float  #: products of gathered rows
    out: float  #: the product whose sum is scattered


class Exposed(NamedTuple):
    """Time in ns in which a rank only waits for a half layer's messages."""

    forward: float
    backward: float  #: in the backward pass, without recomputation
    again: float  #: the part of ``backward`` for rows gathered again; not in a recomputed half


def default_chunks(rows: int, ranks: int) -> int:
    """Parts in which a micro-batch of ``rows`` rows is sent, without a device profile."""
    return min(max(rows // ROWS_OF_A_PART, 1), MOST_CHUNKS)


def halves(dim: int, layer: LayerShape) -> tuple[HalfLayer, HalfLayer]:
    """Both halves of a layer, as if it had grouped-query attention and a gate."""
    every = max(layer.attention_parameters + layer.feed_forward_parameters, 1)
    attention = layer.attention_parameters / every
    out = min(dim * layer.heads * layer.value_dim / every, attention)
    gate = layer.feed_forward_parameters / every / 3
    return HalfLayer(attention - out, out), HalfLayer(2 * gate, gate)


def chunks_of(latency: LatencyModel, rows: int) -> int:
    """Parts in which the rows of a micro-batch are sent: the fewest with nearly the least waits.

    Fewer parts are taken if layers then wait at most :data:`LEAST_GAIN` of their products longer.
    """

    def waits(chunks: int) -> float:
        return sum(
            half.forward + half.backward
            for kind in latency.kinds
            for half in exposed_halves(kind, rows, chunks)
        )

    if rows in latency.known_chunks:
        return latency.known_chunks[rows]
    waited = [waits(chunks) for chunks in range(1, MOST_CHUNKS + 1)]
    products = sum(kind.products_ns(rows, back) for kind in latency.kinds for back in (False, True))
    enough = min(waited) + LEAST_GAIN * products
    fewest = 1 + next(parts for parts, each in enumerate(waited) if each <= enough)
    return latency.known_chunks.setdefault(rows, fewest)


def waited_ns(latency: LatencyModel, rows: Iterable[int]) -> tuple[int, int]:
    """Time in ns that layers wait for messages of rows, with overlap and without.

    Both are summed over passes, layers and micro-batches of ``rows`` rows, without recomputation.
    """
    kinds = [(n, kind) for n, kind in zip(latency.shape.kinds.values(), latency.kinds, strict=True)]
    waited = messages = 0
    for each in rows:
        for count, kind in kinds:
            passes = (kind.tensor_parallel_ns(each, backward=back) for back in (False, True))
            waited += count * sum(passes)
            messages += 4 * count * sum(kind.messages_ns(each))
    return waited, messages


def exposed_halves(latency: LatencyModel, rows: int, chunks: int = 0) -> tuple[Exposed, Exposed]:
    """Time that the attention and the feed-forward half of a layer wait for their messages.

    ``rows`` are the rank's rows, sent in so many ``chunks``; 0: as :func:`chunks_of` says.
    """
    gather, scatter = latency.messages_ns(rows)
    if latency.overlap == "off" or latency.mesh.tensor == 1:
        return (Exposed(gather + scatter, gather + scatter, 0),) * 2
    beside = partial(_waited_for, latency)
    forward_ns, backward_ns = (latency.products_ns(rows, each) for each in (False, True))
    each_ns = backward_ns / 2  # gradients of rows; gradients of weights take as long
    both = halves(latency.shape.dim, latency.layer)
    if latency.overlap == "late":
        summed = (beside(scatter, sum(half) * each_ns) for half in both)
        first, second = (Exposed(gather + scatter, gather + waited, 0) for waited in summed)
        return first, second
    chunks = chunks or chunks_of(latency, rows)
    gather_part, scatter_part = latency.messages_ns(rows, chunks)

    def in_parts(message: float, product: float) -> float:
        return message + (chunks - 1) * beside(message, product / chunks)

    def of_half(half: HalfLayer) -> Exposed:
        again = beside(gather, half.into * each_ns)
        forward = in_parts(gather_part, half.into * forward_ns)
        forward += in_parts(scatter_part, half.out * forward_ns)
        backward = in_parts(gather_part, half.out * each_ns) + beside(scatter, half.into * each_ns)
        return Exposed(forward, backward + again, again)

    first, second = map(of_half, both)
    return first, second


def exposed_keys(latency: LatencyModel, rows: int, there: int, back: int) -> tuple[int, int, int]:
    """Time in ns that a layer waits for messages: of keys, of their gradients, of refetched keys.

    Replicas that share a micro-batch without context parallelism are assumed to wait for all of it.

    Args:
        rows: rows of the micro-batch on the rank.
        there: time in ns of the message of keys and values, which backward fetches again.
        back: time in ns of the message of their gradients.
    """
    if latency.overlap != "all" or latency.mesh.context == 1:
        return there, back, there
    # The matrices of queries and of outputs are equally large. If rows overlap too, only the last
    # part of the queries is left to compute beside keys, and gradients of weights come later.
    tensor, (half, _) = latency.mesh.tensor > 1, halves(latency.shape.dim, latency.layer)
    forward, backward = (half.out * latency.products_ns(rows, each) for each in (False, True))
    return (
        round(_waited_for(latency, there, forward / (chunks_of(latency, rows) if tensor else 1))),
        round(_waited_for(latency, back, backward / (1 + tensor))),
        round(_waited_for(latency, there, backward)),
    )


def _waited_for(latency: LatencyModel, message: float, product: float) -> float:
    """How long a message is waited for that is sent while a product is computed."""
    return max(message - product, message * (1.0 - 1.0 / latency.profile.slowed_beside))
