"""Attention split by heads over context-parallel ranks (DeepSpeed Ulysses), as it would cost.

Each rank holds an equal range of a micro-batch's tokens. Around the kernel an all-to-all turns "all
heads of some rows" into "some heads of all rows", so that work is equal whatever the lengths are
and no key is copied. ``lightning_wlb`` once ran it as a sharding; it has only the costs here, as
those of a baseline. It sends rows · (ranks - 1) · (2 · heads / ranks + 2 · key/value heads of a
rank) · head_dim elements, an exchange of keys at most rows · (ranks - 1) · 2 · kv_heads · head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from lightning_wlb.cost.communication import Communication
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.plan import Slice
from lightning_wlb.prediction import predictor
from lightning_wlb.prediction.micro_batch import MicroBatchCost, over_layers, times_by_mode
from lightning_wlb.sharding import Layout


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


def by_heads(
    latency: LatencyModel, slices: Sequence[Slice], placed: Layout, **_: Any
) -> MicroBatchCost:
    """The cost of a micro-batch of whole pieces whose ranks split the heads: equal on all."""
    ranks = placed.ranks
    lengths = np.array(placed.lengths, dtype=np.int64)
    costs = []
    for kind in latency.kinds:
        layer, tensor = kind.layer, kind.mesh.tensor
        heads = tensor * max(-(-layer.heads // tensor // ranks), 1)
        part = replace(layer, heads=heads, kv_heads=min(heads, tensor))
        shape = ModelShape.of_layers(latency.shape.dim, latency.shape.vocab_size, [part])
        attention = replace(kind, shape=shape).attention_ns(lengths, lengths)
        exchange = head_parallel_ns(kind, placed.rows)
        # Nothing is fetched again but where attention is.
        *modes, full = times_by_mode(kind, placed.rows, [attention], [(exchange, 0)])
        ((forward, backward),) = full.layer_ns
        costs.append([*modes, full._replace(layer_ns=((forward, backward + exchange),))])
    # A rank has as many keys as rows, of its heads; a key head that several ranks read is copied.
    copies = max(max(ranks // kind.rank_kv_heads, 1) for kind in latency.kinds)
    return MicroBatchCost(
        rows=placed.rows,
        keys=placed.rows * copies,
        indexed=0,
        kept_rows=0,
        by_mode=over_layers(latency, costs),
        segments=len(lengths),
    )


@contextmanager
def split_by_heads() -> Iterator[None]:
    """Let predictors take context-parallel ranks to split the heads."""
    with mock.patch.object(predictor, "micro_batch_cost", by_heads):
        yield
