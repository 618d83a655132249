"""What one micro-batch costs on its context-parallel group.

Each rank's attention segments go through the latency model, and a layer takes as long as on the
group's slowest rank, for which all wait at the exchange of keys and values. A slice attends to the
earlier keys of its piece, too: they are put together with its own keys in forward and again in
backward, gathered from the group or copied on a single rank.

Cost: about 0.1 ms per context rank and kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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
    window = latency.shape.sliding_window  # the widest: all layers exchange the same keys
    reach = UNBOUNDED if window is None else window - 1  # keys that a query sees besides its own
    earlier = int(np.minimum(before, reach).sum())
    if sliced:  # every rank sends all its rows, and those of earlier keys that it holds
        travelling = (placed.ranks - 1) * (placed.rows - (-earlier // placed.ranks))
    else:
        travelling = _travelling(placed, window)

    def exchange_ns(kind: LatencyModel, keys: int) -> tuple[int, int]:
        """Putting together so many keys on a rank, for one layer."""
        if placed.ranks > 1:
            forward, backward = (
                kind.context_parallel_ns(travelling, keys, backward=each, replicas=replicas)
                for each in PASSES
            )
        elif earlier:
            forward, backward = (kind.slice_keys_ns(keys, backward=each) for each in PASSES)
        else:
            return 0, 0
        # Backward repeats forward's; under "full" checkpointing the recomputation counts that.
        repeated = 0 if latency.activation_checkpointing == "full" else forward
        return forward, backward + repeated

    segments = []  # of each rank: queries, keys, and how many keys it reads in all
    _, document, start, stop = placed.table.T
    for first, end in pairwise(placed.first.tolist()):
        own = slice(first, end)
        queries = stop[own] - start[own]
        keys = stop[own] + before[document[own]]
        segments.append((queries, keys, int(np.minimum(keys, queries + reach).sum())))
    costs = []
    for kind in latency.kinds:
        attention: list[tuple[int, int]] = []
        layer: list[tuple[int, int]] = []
        for queries, keys, read in segments:
            forward, backward = (kind.attention_ns(queries, keys, backward=each) for each in PASSES)
            exchange = exchange_ns(kind, read)
            attention.append((forward, backward))
            layer.append((forward + exchange[0], backward + exchange[1]))
        costs.append(_KindCost.of(attention, layer, _rest_ns(kind, placed.rows)))
    most_keys = max(read for _, _, read in segments)
    return MicroBatchCost(
        rows=placed.rows,
        keys=most_keys,
        indexed=most_keys if placed.ranks > 1 else 0,
        kept_rows=placed.rows if kept else 0,
        **_over_layers(latency, costs),
    )


class _KindCost(NamedTuple):
    """A layer of one kind; pairs are (forward, backward)."""

    attention_ns: tuple[int, int]  # on the slowest rank
    mean_attention_ns: tuple[float, float]  # over the ranks
    layer_ns: tuple[int, int]  # on the slowest rank

    @staticmethod
    def of(
        attention: Sequence[tuple[int, int]],
        layer: Sequence[tuple[int, int]],
        rest: tuple[int, int],
    ) -> _KindCost:
        """From attention, attention with its exchange (of each rank), and the rest of a layer."""
        attentions, layers = list(zip(*attention, strict=True)), list(zip(*layer, strict=True))
        ranks = len(attention)
        return _KindCost(
            (max(attentions[0]), max(attentions[1])),
            (sum(attentions[0]) / ranks, sum(attentions[1]) / ranks),
            (max(layers[0]) + rest[0], max(layers[1]) + rest[1]),
        )


def _over_layers(latency: LatencyModel, costs: Sequence[_KindCost]) -> dict[str, Any]:
    """Figures of a MicroBatchCost: attention of the mean layer, and layers by kind."""
    layer_ns = tuple(cost.layer_ns for cost in costs)
    if len(costs) == 1:
        return costs[0]._asdict() | {"layer_ns": layer_ns}
    counts, layers = latency.shape.kinds.values(), latency.shape.layers

    def mean(of_kinds: Iterable[float]) -> float:
        return sum(count * each for count, each in zip(counts, of_kinds, strict=True)) / layers

    slowest, average = zip(*(cost[:2] for cost in costs), strict=True)
    return {
        "attention_ns": tuple(round(mean(each)) for each in zip(*slowest, strict=True)),
        "mean_attention_ns": tuple(mean(each) for each in zip(*average, strict=True)),
        "layer_ns": layer_ns,
    }


def _by_heads(latency: LatencyModel, placed: Layout) -> MicroBatchCost:
    """The cost of a micro-batch whose context-parallel ranks split the heads: equal on all."""
    ranks = placed.ranks
    lengths = np.array(placed.lengths, dtype=np.int64)
    costs = []
    for kind in latency.kinds:
        forward, backward = (
            kind.attention_ns(lengths, lengths, backward=each, head_split=ranks) for each in PASSES
        )
        exchange = [kind.head_parallel_ns(placed.rows, backward=each) for each in PASSES]
        layer = forward + exchange[0], backward + exchange[1]
        costs.append(_KindCost.of([(forward, backward)], [layer], _rest_ns(kind, placed.rows)))
    # As many keys as rows, of some of the heads; heads that several ranks read are copied.
    copies = max(max(ranks // kind.rank_kv_heads, 1) for kind in latency.kinds)
    return MicroBatchCost(
        rows=placed.rows,
        keys=placed.rows * copies,
        indexed=0,
        kept_rows=0,
        **_over_layers(latency, costs),
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
