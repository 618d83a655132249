"""What one micro-batch costs on its context-parallel group.

Each rank's attention segments go through the latency model, and a layer takes as long as on the
group's slowest rank, for which all wait at the exchange of keys and values. A slice attends to the
earlier keys of its piece, too: they are put together with its own keys in forward and again in
backward, gathered from the group or copied on a single rank.

Cost: about 0.1 ms per context rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import Slice
from lightning_wlb.prediction.step import MicroBatchCost
from lightning_wlb.sharding import Layout, traffic, uses_all_to_all

PASSES = (False, True)  # whether it is backward
UNBOUNDED = 2**62  # more keys than any query sees


def micro_batch_cost(
    latency: LatencyModel,
    slices: Sequence[Slice],
    placed: Layout,
    *,
    replicas: int = 1,
    kept: bool = False,
) -> MicroBatchCost:
    """The cost of a micro-batch of slices.

    Args:
        latency: of the model on the mesh.
        slices: of the micro-batch.
        placed: how they lie on the context-parallel group, of all replicas that share it.
        replicas: how many share the micro-batch.
        kept: whether a later micro-batch reads its keys.
    """
    before = np.array([each.context for each in slices], dtype=np.int64)
    sliced = kept or bool(before.any())
    if placed.by_heads and not sliced:
        return _by_heads(latency, placed)
    window = latency.shape.sliding_window
    reach = UNBOUNDED if window is None else window - 1  # keys that a query sees besides its own
    earlier = int(np.minimum(before, reach).sum())
    if sliced:  # every rank sends all its rows, and those of earlier keys that it holds
        travelling = (placed.ranks - 1) * (placed.rows - (-earlier // placed.ranks))
    else:
        travelling = _travelling(placed, window)

    def exchange_ns(keys: int) -> tuple[int, int]:
        """Putting together so many keys on a rank."""
        if placed.ranks > 1:
            forward, backward = (
                latency.context_parallel_ns(travelling, keys, backward=each, replicas=replicas)
                for each in PASSES
            )
        elif earlier:
            forward, backward = (latency.slice_keys_ns(keys, backward=each) for each in PASSES)
        else:
            return 0, 0
        # Backward repeats forward's; under "full" checkpointing the recomputation counts that.
        repeated = 0 if latency.activation_checkpointing == "full" else forward
        return forward, backward + repeated

    attention: list[tuple[int, int]] = []
    layer: list[tuple[int, int]] = []
    most_keys = 0
    _, document, start, stop = placed.table.T
    for first, end in pairwise(placed.first.tolist()):
        own = slice(first, end)
        queries = stop[own] - start[own]
        keys = stop[own] + before[document[own]]
        read = int(np.minimum(keys, queries + reach).sum())
        most_keys = max(most_keys, read)
        forward, backward = (latency.attention_ns(queries, keys, backward=each) for each in PASSES)
        exchange = exchange_ns(read)
        attention.append((forward, backward))
        layer.append((forward + exchange[0], backward + exchange[1]))
    rest = _rest_ns(latency, placed.rows)
    attentions, layers = list(zip(*attention, strict=True)), list(zip(*layer, strict=True))
    return MicroBatchCost(
        rows=placed.rows,
        keys=most_keys,
        indexed=most_keys if placed.ranks > 1 else 0,
        kept_rows=placed.rows if kept else 0,
        attention_ns=(max(attentions[0]), max(attentions[1])),
        mean_attention_ns=(sum(attentions[0]) / placed.ranks, sum(attentions[1]) / placed.ranks),
        layer_ns=(max(layers[0]) + rest[0], max(layers[1]) + rest[1]),
    )


def _by_heads(latency: LatencyModel, placed: Layout) -> MicroBatchCost:
    """The cost of a micro-batch whose context-parallel ranks split the heads: equal on all."""
    ranks = placed.ranks
    lengths = np.array(placed.lengths, dtype=np.int64)
    forward, backward = (
        latency.attention_ns(lengths, lengths, backward=each, head_split=ranks) for each in PASSES
    )
    exchange = [latency.head_parallel_ns(placed.rows, backward=each) for each in PASSES]
    rest = _rest_ns(latency, placed.rows)
    # As many keys as rows, of some of the heads; heads that several ranks read are copied.
    keys = placed.rows * max(ranks // latency.rank_kv_heads, 1)
    return MicroBatchCost(
        rows=placed.rows,
        keys=keys,
        indexed=0,
        kept_rows=0,
        attention_ns=(forward, backward),
        mean_attention_ns=(float(forward), float(backward)),
        layer_ns=(forward + exchange[0] + rest[0], backward + exchange[1] + rest[1]),
    )


def _rest_ns(latency: LatencyModel, rows: int) -> tuple[int, int]:
    """Forward and backward of a layer without attention and its exchange."""
    forward, backward = (
        latency.linear_ns(rows, backward=each) + latency.tensor_parallel_ns(rows, backward=each)
        for each in PASSES
    )
    return forward, backward


def _travelling(placed: Layout, sliding_window: int | None) -> int:
    """Rows of keys that the group's busiest rank receives or sends, where no piece is sliced."""
    if placed.ranks == 1 or not placed.shared:
        return 0
    moved = traffic(placed, sliding_window)
    if uses_all_to_all(placed, moved):
        return max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return (placed.ranks - 1) * placed.shared
