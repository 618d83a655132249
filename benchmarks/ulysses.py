"""Attention split by heads over context-parallel ranks (DeepSpeed Ulysses), as it would cost.

Each rank holds an equal range of a micro-batch's tokens. Around the kernel an all-to-all turns "all
heads of some rows" into "some heads of all rows", so that work is equal whatever the lengths are
and no key is copied. ``lightning_wlb`` once ran it as a sharding; it has only the costs here, as
those of a baseline. It sends rows · (ranks - 1) · (2 · heads / ranks + 2 · key/value heads of a
rank) · head_dim elements, an exchange of keys at most rows · (ranks - 1) · 2 · kv_heads · head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_wlb.cost.communication import Communication
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.shape import ModelShape


def all_to_all_ns(messages: Communication, size: int) -> int:
    """Every context-parallel rank sends ``size`` bytes, in equal parts to all the others.

    Parts for other nodes go through the rank's own network adapter only, at the same time as parts
    for its own node go through the node's link.
    """
    ranks, links = messages.mesh.context, messages.profile.links
    if ranks == 1 or size == 0:
        return 0
    together = messages._together("context")
    if together == ranks:
        return messages.exchange_ns("context", ranks, size)
    outside = size * (ranks - together) // (ranks - 1)
    inside = links["node"].ns(together - 1, size - outside)
    return round(max(links["network"].ns(ranks - together, outside), inside))


def head_parallel_ns(kind: LatencyModel, rows: int) -> int:
    """Two all-to-alls of a layer whose ranks have ``rows`` rows each and split the heads.

    One sends queries, keys and values, the other outputs. Backward has the same, of gradients.
    """
    ranks, result = kind.mesh.context, 0
    heads = -(-kind.layer.heads // kind.mesh.tensor // ranks)
    key_heads = max(kind.rank_kv_heads // ranks, 1)
    for each in (heads + 2 * key_heads, heads):
        size = rows * ranks * each * kind._width * kind.layer.head_width
        # What is sent is written once and read once, and so is what is received.
        result += all_to_all_ns(kind.communication, size * (ranks - 1) // ranks)
        result += kind._traffic_ns(4 * size)
    return result


def attention_ns(latency: LatencyModel, lengths: Sequence[int], rows: int) -> int:
    """Attention over whole pieces in a layer with its messages, both passes, on ``rows`` rows."""
    (layer,) = latency.shape.kinds
    tensor, ranks = latency.mesh.tensor, latency.mesh.context
    heads = tensor * max(-(-layer.heads // tensor // ranks), 1)
    part = replace(layer, heads=heads, kv_heads=min(heads, tensor))
    shape = ModelShape.of_layers(latency.shape.dim, latency.shape.vocab_size, [part])
    tokens = np.array(lengths, dtype=np.int64)
    kernel = replace(latency, shape=shape).attention_ns(tokens, tokens)
    return sum(kernel) + 2 * head_parallel_ns(latency, rows)
