"""What one micro-batch costs on its context-parallel group.

Each rank's attention segments go through the latency model, and a layer takes as long as on the
group's slowest rank, for which all wait at the exchange of keys and values. A slice attends to the
earlier keys of its piece, too: they are put together with its own keys in forward and again in
backward, gathered from the group or copied on a single rank.

Recomputation (``MicroBatch.recompute``) adds to a layer's backward the forward of what is computed
again. A recomputed attention has then put its keys together, and its backward need not. The times
of all three modes are made at once, because they differ by sums of the same numbers.

Cost: about 0.1 ms per context rank and kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple

import numpy as np

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import Slice
from lightning_wlb.prediction.step import MODES, MicroBatchCost, PassTimes
from lightning_wlb.sharding import Layout, traffic, uses_all_to_all
from lightning_wlb.sharding.integer_ranges import offsets

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
    reach = reach_of(window)
    earlier = int(np.minimum(before, reach).sum())
    if sliced:  # every rank sends all its rows, and those of earlier keys that it holds
        travelling = (placed.ranks - 1) * (placed.rows - (-earlier // placed.ranks))
    else:
        travelling = _travelling(placed, window)

    exchange = Exchange(travelling, placed.ranks, earlier, replicas)
    _, document, start, stop = placed.table.T
    every_query, every_key = stop - start, stop + before[document]
    read = np.diff(offsets(np.minimum(every_key, every_query + reach))[placed.first]).tolist()
    segments = [
        (every_query[first:end], every_key[first:end])
        for first, end in pairwise(placed.first.tolist())
    ]
    costs = []
    for kind in latency.kinds:
        attention = [
            (
                kind.attention_ns(queries, keys, backward=False),
                kind.attention_ns(queries, keys, backward=True),
            )
            for queries, keys in segments
        ]
        exchanges = [exchange.ns(kind, keys) for keys in read]
        costs.append(by_mode(kind, placed.rows, attention, exchanges, refetches=True))
    return MicroBatchCost(
        rows=placed.rows,
        keys=max(read),
        indexed=max(read) if placed.ranks > 1 else 0,
        kept_rows=placed.rows if kept else 0,
        by_mode=over_layers(latency, costs),
        segments=max(len(queries) for queries, _ in segments),
    )


def most_keys(latency: LatencyModel, slices: Sequence[Slice], placed: Layout) -> int:
    """``keys`` of :class:`.MicroBatchCost`, where ranks exchange keys."""
    before = np.array([each.context for each in slices], dtype=np.int64)
    _, document, start, stop = placed.table.T
    seen = stop - start + reach_of(latency.shape.sliding_window)
    read = offsets(np.minimum(stop + before[document], seen))[placed.first]
    return int(np.diff(read).max())


class Exchange(NamedTuple):
    """What puts keys together on the ranks of a micro-batch.

    Attributes:
        travelling: rows that the busiest rank receives, or sends.
        ranks: of the context-parallel group.
        earlier: keys of earlier slices that are seen.
        replicas: how many share the micro-batch.
    """

    travelling: int
    ranks: int
    earlier: int
    replicas: int

    def ns(self, kind: LatencyModel, keys: int) -> tuple[int, int]:
        """Forward and backward of putting together so many keys on a rank, for one layer."""
        if self.ranks > 1:
            forward, backward = (
                kind.context_parallel_ns(
                    self.travelling, keys, backward=each, replicas=self.replicas
                )
                for each in PASSES
            )
            return forward, backward
        if self.earlier:
            forward, backward = (kind.slice_keys_ns(keys, backward=each) for each in PASSES)
            return forward, backward
        return 0, 0


def reach_of(sliding_window: int | None) -> int:
    """Keys that a query sees besides its own, at most."""
    return UNBOUNDED if sliding_window is None else sliding_window - 1


def by_mode(
    kind: LatencyModel,
    rows: int,
    attention: Sequence[tuple[int, int]],
    exchange: Sequence[tuple[int, int]],
    *,
    refetches: bool,
) -> list[PassTimes]:
    """Times of a layer of one kind with each recomputation.

    Args:
        kind: of the layer.
        rows: of each rank.
        attention: forward and backward of the kernel on each rank.
        exchange: forward and backward of putting keys together on each rank.
        refetches: whether a backward that recomputes no attention repeats the forward's exchange.
    """
    forward, backward, again = kind.rows_ns(rows)
    first, second = zip(*attention, strict=True)
    fetches, gathers = zip(*exchange, strict=True)
    mean, there = sum(first) / len(first), forward + max(map(add, first, fetches))

    def times(attends_again: bool) -> tuple[tuple[int, int], tuple[float, float], int]:
        """Attention on the slowest and on the mean rank; backward of the layer."""
        attends = list(map(add, second, first)) if attends_again else second
        moves = map(add, gathers, fetches) if attends_again or refetches else gathers
        back = backward + max(map(add, attends, moves))
        return (max(first), max(attends)), (mean, sum(attends) / len(attends)), back

    once = times(False)
    kernel = {"none": once, "selective": once, "full": times(True)}
    result = []
    for mode, added in zip(MODES, again, strict=True):
        slowest, average, back = kernel[mode]
        result.append(PassTimes(slowest, average, ((there, back + added),)))
    return result


def over_layers(
    latency: LatencyModel, costs: Sequence[Sequence[PassTimes]]
) -> tuple[PassTimes, ...]:
    """Attention of the mean layer, and layers by kind, from the times of each kind and mode."""
    if len(costs) == 1:
        return tuple(costs[0])
    counts, layers = latency.shape.kinds.values(), latency.shape.layers

    def mean(of_kinds: Iterable[float]) -> float:
        return sum(count * each for count, each in zip(counts, of_kinds, strict=True)) / layers

    result = []
    for of_kinds in zip(*costs, strict=True):
        slowest, average, layer_ns = zip(*of_kinds, strict=True)
        attention, means = (
            tuple(map(mean, zip(*each, strict=True))) for each in (slowest, average)
        )
        result.append(
            PassTimes(
                (round(attention[0]), round(attention[1])),
                (means[0], means[1]),
                tuple(each for (each,) in layer_ns),
            )
        )
    return tuple(result)


def _by_heads(latency: LatencyModel, placed: Layout) -> MicroBatchCost:
    """The cost of a micro-batch whose context-parallel ranks split the heads: equal on all."""
    ranks = placed.ranks
    lengths = np.array(placed.lengths, dtype=np.int64)
    costs = []
    for kind in latency.kinds:
        forward, backward = (
            kind.attention_ns(lengths, lengths, backward=each, head_split=ranks) for each in PASSES
        )
        exchange = kind.head_parallel_ns(placed.rows)
        costs.append(
            by_mode(
                kind, placed.rows, [(forward, backward)], [(exchange, exchange)], refetches=False
            )
        )
    # As many keys as rows, of some of the heads; heads that several ranks read are copied.
    copies = max(max(ranks // kind.rank_kv_heads, 1) for kind in latency.kinds)
    return MicroBatchCost(
        rows=placed.rows,
        keys=placed.rows * copies,
        indexed=0,
        kept_rows=0,
        by_mode=over_layers(latency, costs),
        segments=len(lengths),
    )


def _travelling(placed: Layout, sliding_window: int | None) -> int:
    """Rows of keys that the group's busiest rank receives or sends, where no piece is sliced."""
    if placed.ranks == 1 or not placed.shared:
        return 0
    moved = traffic(placed, sliding_window)
    if uses_all_to_all(placed, moved):
        return max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return (placed.ranks - 1) * placed.shared
