"""What is left to wait for of messages that travel while products run: of rows, and of keys.

:mod:`lightning_wlb.models.tensor_parallel_overlap` says what runs while rows travel between
tensor-parallel ranks, :mod:`lightning_wlb.attention.packed` while keys travel between
context-parallel ones. Here a message and the products beside it end with the later one of the two.
While it travels the device computes slower (``Profile.slowed_beside``). Where rows travel in n
equal parts, the first message and the last product have nothing beside them, or the other way
round. Keys travel at once. Element-wise work and attention hide nothing.

Short micro-batches, whose parts would take little but launches and hops, travel in one, and so do
all where links are so fast that there is next to nothing to hide (:func:`chunks_of`).

Cost: some microseconds; times are remembered by rows. Not for messages that share a link with
others at the same time, as keys with rows in a node, or with parameters between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightning_wlb.cost.shape import LayerShape

if TYPE_CHECKING:
    from lightning_wlb.cost.latency import LatencyModel

Overlap = Literal["off", "late", "all"]
"""Which messages travel while products run: none; the sum of a half layer's gradients of rows,
beside its gradients of weights (Hugging Face blocks); all of rows and of keys."""

MOST_CHUNKS = 4
"""Parts beyond four hide little more, and each has fewer rows for its products."""

LEAST_GAIN = 0.0025
"""Part of a layer's products that more parts must save: over loopback, where 0.2 % could be saved,
four parts made a forward 1.026 times as long, one 1.003 (benchmarks/results/overlap.md)."""

ROWS_OF_A_PART = 1024
"""Rows of a part, over all ranks, where no device profile is known. Chosen, not measured."""


class HalfLayer(NamedTuple):
    """Shares of a layer's products: those of its attention or its feed-forward half."""

    into: float  #: products of gathered rows
    out: float  #: the product whose sum is scattered


class Exposed(NamedTuple):
    """Time in ns of a half layer's messages in which the rank computes nothing."""

    forward: float
    backward: float  #: of the backward pass, without recomputation
    again: float  #: the part of ``backward`` that gathers rows again, which a recomputed half lacks


def default_chunks(rows: int, ranks: int) -> int:
    """Parts in which a micro-batch of ``rows`` rows travels, where no device profile is known."""
    return min(max(rows // ROWS_OF_A_PART, 1), MOST_CHUNKS)


def halves(dim: int, layer: LayerShape) -> tuple[HalfLayer, HalfLayer]:
    """Both halves of a layer, as if it had grouped-query attention and a gate."""
    every = max(layer.attention_parameters + layer.feed_forward_parameters, 1)
    attention = layer.attention_parameters / every
    out = min(dim * layer.heads * layer.value_dim / every, attention)
    gate = layer.feed_forward_parameters / every / 3
    return HalfLayer(attention - out, out), HalfLayer(2 * gate, gate)


def chunks_of(latency: LatencyModel, rows: int) -> int:
    """Parts in which the rows of a micro-batch travel: as few as bring the least waiting.

    A further part is worth it if layers then wait less by :data:`LEAST_GAIN` of their products.
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
    """Time in ns that layers wait for rows to travel, and would wait if nothing ran beside them.

    Both are forward and backward, summed over all layers of the model and over the micro-batches,
    whose numbers of rows are given. Recomputation is left out.
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
    """What the attention and the feed-forward half of a layer wait for their messages.

    ``rows`` are the micro-batch's on the rank, ``chunks`` the parts in which they travel; 0 means
    :func:`chunks_of`.
    """
    gather, scatter = latency.messages_ns(rows)
    if latency.overlap == "off" or latency.mesh.tensor == 1:
        return (Exposed(gather + scatter, gather + scatter, 0),) * 2
    beside = partial(_waited_for, latency)
    forward_ns, backward_ns = (latency.products_ns(rows, each) for each in (False, True))
    each_ns = backward_ns / 2  # gradients of rows; those of weights take as long
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
    """What a layer waits for messages of keys, in ns: in forward, of gradients, and of keys again.

    Replicas that share a micro-batch without context parallelism are taken to wait for all.

    Args:
        rows: of the micro-batch on the rank.
        there: time in ns of the message of keys and values, which backward fetches again.
        back: time in ns of the message of their gradients.
    """
    if latency.overlap != "all" or latency.mesh.context == 1:
        return there, back, there
    # The matrices of queries and of outputs are as large. Where rows travel too, the last part of
    # the queries is left to compute beside keys, and gradients of weights come later.
    tensor, (half, _) = latency.mesh.tensor > 1, halves(latency.shape.dim, latency.layer)
    forward, backward = (half.out * latency.products_ns(rows, each) for each in (False, True))
    return (
        round(_waited_for(latency, there, forward / (chunks_of(latency, rows) if tensor else 1))),
        round(_waited_for(latency, back, backward / (1 + tensor))),
        round(_waited_for(latency, there, backward)),
    )


def _waited_for(latency: LatencyModel, message: float, product: float) -> float:
    """How long a message is waited for that travels while a product is computed."""
    return max(message - product, message * (1.0 - 1.0 / latency.profile.slowed_beside))
