"""Where to measure, and how much of it fits into a device's memory.

A point of the attention kernel is one call over equal segments. On CUDA a call needs many tiles of
queries to keep the device busy, so there are as many segments as make :data:`BUSY_TOKENS`, or as
fit into the memory that points may take (:func:`segment_bytes`). Points of which too few fit, or
with more than ``Grid.pairs`` pairs, are left out, and get the rate of a neighbour.

Attention over many keys for each query takes most memory: for the 7B model's heads, a call of
16,384 queries over 512 times as many keys would take 400 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_wlb.cost.shape import ModelShape

BUSY_TOKENS = 16384
"""Queries of a call on CUDA, if they fit."""

BUSY_TILES = 128
"""Tiles of 128 queries of all heads in a call on CUDA, at least: GPUs have about as many
processors."""


@dataclass(frozen=True)
class Grid:
    """Where to measure; the default is that of a CPU."""

    #: queries of attention segments
    queries: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
    #: keys of attention segments over their queries
    keys_per_query: tuple[float, ...] = (1.0, 1.125, 1.5, 2.0, 4.0, 16.0, 128.0)
    #: most query-key pairs of a segment; points beyond have a neighbour's rate. On a CPU also the
    #: most of a call with several segments
    pairs: int = 2**23
    rows: tuple[int, ...] = (32, 128, 512, 2048, 8192)  #: rows of layers and of the head
    repeats: int = 5  #: repetitions of every measurement, of which the median counts
    held_out: int = 9  #: micro-batches by which the finished profile is judged


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
"""Grids of a profile that is kept, by kind of device: one to two minutes."""


def segment_bytes(shape: ModelShape, width: int, queries: int, keys: int) -> int:
    """Bytes that one segment of a call takes, forward and backward, in the hungriest kernel.

    ``width`` is the number of bytes of an element.
    """
    layer = shape.each_layer[0]
    # Queries, their gradient, the output and that of the call before, and its gradient; the
    # queries' gradient in float32 of FlashAttention-2, and two numbers for each head.
    query = layer.heads * (layer.head_width * (5 * width + 4) + 8)
    # Keys, values, their gradients, and these once more for every head that shares them.
    shared = 2 * layer.heads if layer.heads > layer.kv_heads else 0
    key = layer.head_width * width * (4 * layer.kv_heads + shared) + 8  # and its index
    return queries * query + keys * key


def segments(
    grid: Grid, shape: ModelShape, width: int, queries: int, keys: int, *, cuda: bool, budget: int
) -> int:
    """Number of equal segments in the call that measures a point; 0 where it is left out.

    ``width`` is the bytes of an element, ``budget`` those that the call may take. ``cuda``: the
    device is a GPU, which must be kept busy; for a CPU a few segments do.
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
