"""The points to measure, as far as they fit into a device's memory.

A point of the attention kernel is one call over equal segments. On CUDA a call needs many tiles of
queries to keep the device busy, so it has as many segments as make :data:`BUSY_TOKENS`, or as fit
into the memory that a point may take (:func:`segment_bytes`). Points with too few fitting segments
or more than ``Grid.pairs`` pairs are left out, and get the rate of a neighbour.

Attention over many keys for each query takes the most memory: for the 7B model's heads, a call of
16,384 queries over 512 times as many keys would take 400 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_wlb.cost.shape import ModelShape

BUSY_TOKENS = 16384
"""Queries of a call on CUDA, if they fit."""

BUSY_TILES = 128
"""Least tiles of 128 queries, over all heads, in a CUDA call: about one per processor of a GPU."""


@dataclass(frozen=True)
class Grid:
    """The points to measure; the defaults are for a CPU."""

    #: queries of attention segments
    queries: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
    #: keys of attention segments, divided by their queries
    keys_per_query: tuple[float, ...] = (1.0, 1.125, 1.5, 2.0, 4.0, 16.0, 128.0)
    #: most query-key pairs of a segment; points with more get a neighbour's rate. On a CPU it is
    #: also the most of a call with several segments
    pairs: int = 2**23
    rows: tuple[int, ...] = (32, 128, 512, 2048, 8192)  #: rows of layers and of the head
    repeats: int = 5  #: repetitions of every measurement, whose median counts
    held_out: int = 9  #: micro-batches on which the finished profile is tested


GRIDS = {
    "cpu": Grid(),
    "cuda": Grid(
        queries=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        keys_per_query=(1.0, 2.0, 4.0, 16.0, 64.0, 512.0),
        pairs=2**33,
        rows=(128, 512, 2048, 8192, 32768, 65536),
        repeats=10,
    ),
}
"""Grids of full profiles, by kind of device; they take one to two minutes."""


def segment_bytes(shape: ModelShape, width: int, queries: int, keys: int) -> int:
    """Bytes of one segment of a call, forward and backward, in the kernel that takes the most.

    ``width`` is the number of bytes of an element.
    """
    layer = shape.each_layer[0]
    # Queries, their gradient, the output of this and of the previous call, the output's gradient,
    # FlashAttention-2's float32 gradient of the queries, and two numbers for each head.
    query = layer.heads * (layer.head_width * (5 * width + 4) + 8)
    # Keys, values, their gradients, and the gradients once more for every head that shares them.
    shared = 2 * layer.heads if layer.heads > layer.kv_heads else 0
    key = layer.head_width * width * (4 * layer.kv_heads + shared) + 8  # and its index
    return queries * query + keys * key


def segments(
    grid: Grid, shape: ModelShape, width: int, queries: int, keys: int, *, cuda: bool, budget: int
) -> int:
    """Number of equal segments in the call that measures a point; 0 if the point is left out.

    ``width`` is the bytes of an element, ``budget`` the bytes that the call may take. ``cuda`` says
    that the device is a GPU, which must be kept busy; a CPU needs only a few segments.
    """
    fit = budget // segment_bytes(shape, width, queries, keys)
    if queries * keys > grid.pairs and keys > queries:
        return 0
    if not cuda:
        return min(fit, max(1, min(16, 4096 // queries, grid.pairs // (queries * keys))))
    wanted = max(1, BUSY_TOKENS // queries)
    tiles = shape.each_layer[0].heads * -(-queries // 128)
    enough = -(-BUSY_TILES // tiles)  # segments
    return min(fit, wanted) if fit >= min(wanted, enough) else 0
