"""What one micro-batch costs on its context-parallel group, once it is laid out.

Each rank's attention segments go through the latency model. A layer takes as long as on the group's
slowest rank, because all ranks wait for it at the exchange of keys and values. A slice also attends
to the earlier keys of its piece: they are put together with its own keys in forward and again in
backward, gathered from the group or copied on a single rank.

Recomputation (``MicroBatch.recompute``) adds to a layer's backward the forward of what is computed
again. A recomputed attention has just put its keys together, so its backward need not do it again.
The three modes differ by sums of the same numbers, so their times are made together.

Cost: about 0.1 ms per context rank and kind of layer. While a packing still searches, use
:mod:`~lightning_wlb.prediction.estimate`, which needs no layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple, get_args

import numpy as np

from lightning_wlb.cost.latency import DTYPE_BYTES, LatencyModel
from lightning_wlb.plan import MicroBatch, Recompute, ReplicaPlan, Slice
from lightning_wlb.sharding import Layout, layout, traffic, uses_all_to_all
from lightning_wlb.sharding.integer_ranges import offsets

MODES: tuple[Recompute, ...] = get_args(Recompute)
"""What a micro-batch may recompute, the least first."""

PASSES = (False, True)
"""Forward and backward, as the ``backward`` argument of the latency model."""

UNBOUNDED = 2**62
"""More keys than any query sees."""


class PassTimes(NamedTuple):
    """Times of a micro-batch in ns, with one kind of recomputation; pairs are (forward, backward).

    Attributes:
        attention_ns: the kernel of one layer on the slowest rank; the mean where layers differ.
        mean_attention_ns: the same as a mean over the ranks.
        layer_ns: everything in a layer of each kind (``ModelShape.kinds``) on the slowest rank,
            communication included.
    """

    attention_ns: tuple[int, int]
    mean_attention_ns: tuple[float, float]
    layer_ns: tuple[tuple[int, int], ...]


class MicroBatchCost(NamedTuple):
    """The sizes and times of one micro-batch on its context-parallel group.

    Attributes:
        rows: rows of each rank, padding included.
        keys: most keys that the attention segments of a rank read.
        indexed: how many of these keys are put in order by an index.
        kept_rows: rows whose keys and values later slices read; 0 if none do.
        by_mode: times with each recomputation, in the order of :data:`MODES`.
        recompute: the mode of the plan; ``_replace`` gives the cost with another.
        segments: most attention segments of a rank.
        going_on: pieces with which later micro-batches go on.
        ranks: context-parallel ranks that share the rows, of all replicas.
    """

    rows: int
    keys: int
    indexed: int
    kept_rows: int
    by_mode: tuple[PassTimes, ...]
    recompute: Recompute = "none"
    segments: int = 1
    going_on: int = 0
    ranks: int = 1

    @property
    def attention_ns(self) -> tuple[int, int]:
        """See :class:`.PassTimes`."""
        return self._times.attention_ns

    @property
    def mean_attention_ns(self) -> tuple[float, float]:
        """See :class:`.PassTimes`."""
        return self._times.mean_attention_ns

    @property
    def layer_ns(self) -> tuple[tuple[int, int], ...]:
        """See :class:`.PassTimes`."""
        return self._times.layer_ns

    @property
    def _times(self) -> PassTimes:
        return self.by_mode[MODES.index(self.recompute)]


def layout_of(replica: ReplicaPlan, micro_batch: MicroBatch, context: int, tensor: int) -> Layout:
    """How a micro-batch lies on the context ranks of all replicas that share it.

    ``context`` and ``tensor`` are the ranks of one replica on these axes.
    """
    lengths = [part.tokens for part in replica.slices_of(micro_batch)]
    return layout(micro_batch.sharding, lengths, context * len(micro_batch.replicas), tensor)


def micro_batch_cost(
    latency: LatencyModel,
    slices: Sequence[Slice],
    placed: Layout,
    *,
    replicas: int = 1,
    going_on: int = 0,
) -> MicroBatchCost:
    """The cost of a micro-batch of slices, without recomputation.

    Args:
        latency: the latency model on the mesh.
        slices: the slices of the micro-batch.
        placed: their layout on the context-parallel ranks of all replicas that share it.
        replicas: how many replicas share the micro-batch (DP-Merge).
        going_on: pieces with which later micro-batches go on, and so read its keys.
    """
    before = np.array([each.context for each in slices], dtype=np.int64)
    sliced = going_on > 0 or bool(before.any())
    window = latency.shape.sliding_window  # the widest: all layers exchange the same keys
    reach = reach_of(window)
    earlier = int(np.minimum(before, reach).sum())
    if sliced:  # every rank sends all its rows, and those of earlier keys that it holds
        received = (placed.ranks - 1) * (placed.rows - (-earlier // placed.ranks))
    else:
        received = _received_rows(placed, window)

    exchange = KeyExchange(received, placed.ranks, earlier, replicas)
    _, document, start, stop = placed.table.T
    every_query, every_key = stop - start, stop + before[document]
    read = np.diff(offsets(np.minimum(every_key, every_query + reach))[placed.first]).tolist()
    segments = [
        (every_query[first:end], every_key[first:end])
        for first, end in pairwise(placed.first.tolist())
    ]
    costs = []
    for kind in latency.kinds:
        if not kind.layer.attends:
            costs.append(recurrent_times(kind, placed.rows, replicas))
            continue
        attention = [kind.attention_ns(queries, keys) for queries, keys in segments]
        exchanges = [exchange.ns(kind, keys) for keys in read]
        costs.append(times_by_mode(kind, placed.rows, attention, exchanges))
    return MicroBatchCost(
        rows=placed.rows,
        keys=max(read),
        indexed=max(read) if placed.ranks > 1 else 0,
        kept_rows=placed.rows if going_on else 0,
        by_mode=over_layers(latency, costs),
        segments=max(len(queries) for queries, _ in segments),
        going_on=going_on,
        ranks=placed.ranks,
    )


def most_keys(latency: LatencyModel, slices: Sequence[Slice], placed: Layout) -> int:
    """``keys`` of :class:`MicroBatchCost`, where ranks exchange keys."""
    before = np.array([each.context for each in slices], dtype=np.int64)
    _, document, start, stop = placed.table.T
    seen = stop - start + reach_of(latency.shape.sliding_window)
    read = offsets(np.minimum(stop + before[document], seen))[placed.first]
    return int(np.diff(read).max())


class KeyExchange(NamedTuple):
    """How the ranks of a micro-batch put together the keys and values that their segments read.

    Attributes:
        received: rows that the busiest rank receives or sends.
        ranks: number of ranks that exchange keys, over all replicas that share the micro-batch.
        earlier: keys of earlier slices that queries see.
        replicas: how many replicas share the micro-batch.
    """

    received: int
    ranks: int
    earlier: int
    replicas: int

    def ns(self, kind: LatencyModel, keys: int) -> tuple[int, int]:
        """Forward and backward time on a rank that reads so many keys, for one layer."""
        if self.ranks == 1 and not self.earlier:
            return 0, 0
        forward, backward = (
            kind.exchange_keys_ns(self.received, keys, backward=each, replicas=self.replicas)
            for each in PASSES
        )
        return forward, backward


def reach_of(sliding_window: int | None) -> int:
    """Most keys that a query sees besides its own."""
    return UNBOUNDED if sliding_window is None else sliding_window - 1


def times_by_mode(
    kind: LatencyModel,
    rows: int,
    attention: Sequence[tuple[int, int]],
    exchange: Sequence[tuple[int, int]],
) -> list[PassTimes]:
    """Times of a layer of one kind with each recomputation, in the order of :data:`MODES`.

    Args:
        kind: the latency model of the layer.
        rows: rows of each rank.
        attention: forward and backward of the kernel on each rank.
        exchange: forward and backward of the exchange of keys on each rank.
    """
    forward, backward, again = kind.rows_ns(rows)
    first, second = zip(*attention, strict=True)
    fetches, gathers = zip(*exchange, strict=True)
    mean, there = sum(first) / len(first), forward + max(map(add, first, fetches))

    def times(attends_again: bool) -> tuple[tuple[int, int], tuple[float, float], int]:
        """Attention on the slowest and on the mean rank; backward of the layer."""
        attends = list(map(add, second, first)) if attends_again else second
        back = backward + max(map(sum, zip(attends, gathers, fetches, strict=True)))
        return (max(first), max(attends)), (mean, sum(attends) / len(attends)), back

    once = times(False)
    kernel = {"none": once, "selective": once, "full": times(True)}
    result = []
    for mode, added in zip(MODES, again, strict=True):
        slowest, average, back = kernel[mode]
        result.append(PassTimes(slowest, average, ((there, back + added),)))
    return result


def recurrent_times(kind: LatencyModel, rows: int, replicas: int) -> list[PassTimes]:
    """:func:`times_by_mode` of a layer without attention.

    What goes into its recurrence and comes out of it travels from rows to heads and back in
    all-to-alls, whose backward has the same of gradients.
    """
    assert kind.layer.recurrence is not None
    axis, ranks = "context" if replicas == 1 else "data", kind.mesh.context * replicas
    own = rows * kind.layer.recurrence.moved // kind.mesh.tensor * DTYPE_BYTES[kind.profile.dtype]
    exchange = kind.communication.exchange_ns(axis, ranks, own * (ranks - 1) // ranks)
    forward, backward, again = kind.rows_ns(rows)
    there, back = forward + exchange, backward + exchange
    return [
        PassTimes((0, 0), (0.0, 0.0), ((there, back + added + (mode == "full") * exchange),))
        for mode, added in zip(MODES, again, strict=True)
    ]


def over_layers(
    latency: LatencyModel, costs: Sequence[Sequence[PassTimes]]
) -> tuple[PassTimes, ...]:
    """Times of a whole model for each mode, from those of each kind of layer and each mode.

    Args:
        latency: the latency model of the whole model.
        costs: [kinds of layers][modes], from :func:`times_by_mode`.
    """
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


def _received_rows(placed: Layout, sliding_window: int | None) -> int:
    """Rows of keys that the group's busiest rank receives or sends, where no piece is sliced."""
    if placed.ranks == 1 or not placed.shared:
        return 0
    moved = traffic(placed, sliding_window)
    if uses_all_to_all(placed, moved):
        return max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return (placed.ranks - 1) * placed.shared
