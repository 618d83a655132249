"""The cost of one micro-batch on its context-parallel group, once it is laid out.

The latency model predicts each rank's attention segments. A layer takes as long as on the group's
slowest rank, because all ranks wait for that rank at the exchange of keys and values. A slice also
attends to the earlier keys of its piece. These are joined with its own keys in forward and again in
backward: gathered from the group, or copied on a single rank.

Recomputation (``MicroBatch.recompute``) adds the forward of the recomputed part to a layer's
backward. Recomputed attention has just joined its keys, so its backward need not do it again. The
times of the three modes are sums of the same numbers, so they are computed together.

Cost: about 0.1 ms per context rank and kind of layer. While a packing still searches, use
:mod:`~lightning_wlb.prediction.estimate`, which needs no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import exposed_keys
from lightning_wlb.plan import ActivationCheckpointing, MicroBatch, Recompute, ReplicaPlan, Slice
from lightning_wlb.sharding import Layout, chunks_of_each, layout, traffic, uses_all_to_all
from lightning_wlb.sharding.integer_ranges import Integers, offsets, reach_of

MODES: tuple[Recompute, ...] = get_args(Recompute)
"""What a micro-batch may recompute, the least first."""

PASSES = (False, True)
"""Forward and backward, as the ``backward`` argument of the latency model."""


def modes_of(given: ActivationCheckpointing) -> Sequence[Recompute]:
    """What a micro-batch may recompute under the user's choice ``given``, the least first."""
    return MODES if given == "auto" else (given,)


class PassTimes(NamedTuple):
    """Times of a micro-batch in ns with one kind of recomputation, as (forward, backward)."""

    #: the kernel of one layer on the slowest rank; the mean over layers if they differ
    attention_ns: tuple[int, int]
    mean_attention_ns: tuple[float, float]  #: the same as a mean over the ranks
    #: everything in a layer of each kind (``ModelShape.kinds``) on the slowest rank, communication
    #: included
    layer_ns: tuple[tuple[int, int], ...]


class MicroBatchCost(NamedTuple):
    """The sizes and times of one micro-batch on its context-parallel group."""

    rows: int  #: rows of each rank, padding included
    keys: int  #: most keys that the attention segments of a rank read
    indexed: int  #: how many of these keys an index puts in order
    kept_rows: int  #: rows whose keys and values later slices read; 0 if none do
    by_mode: tuple[PassTimes, ...]  #: times with each recomputation, in the order of :data:`MODES`
    recompute: Recompute = "none"  #: the mode of the plan; ``_replace`` gives another
    segments: int = 1  #: most attention segments of a rank
    going_on: int = 0  #: pieces that have slices in later micro-batches
    ranks: int = 1  #: context-parallel ranks of all replicas that share the micro-batch

    @property
    def times(self) -> PassTimes:
        """Times with the recomputation of the plan."""
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
        placed: the slices' layout on the context-parallel ranks of all replicas that share them.
        replicas: how many replicas share the micro-batch (DP-Merge).
        going_on: pieces that have slices in later micro-batches, which read its keys.
    """
    before = np.array([each.context for each in slices], dtype=np.int64)
    sliced = going_on > 0 or bool(before.any())
    window = latency.shape.sliding_window  # the widest: all layers exchange the same keys
    reach = reach_of(window)
    earlier = int(np.minimum(before, reach).sum())
    if sliced:  # every rank sends all its rows, and the rows of earlier keys that it holds
        received = (placed.ranks - 1) * (placed.rows - (-earlier // placed.ranks))
    else:
        received = _received_rows(placed, window)

    _, document, start, stop = placed.table.T
    queries, keys = stop - start, stop + before[document]
    read = np.diff(offsets(np.minimum(keys, queries + reach))[placed.first])
    attention = [
        [
            kind.attention_ns(queries[first:end], keys[first:end])
            for first, end in pairwise(placed.first.tolist())
        ]
        for kind in latency.kinds
    ]
    together = read if placed.ranks > 1 or earlier else 0 * read
    (by_mode,) = times_by_mode(
        latency,
        [placed.rows],
        np.array(attention).transpose(2, 0, 1)[:, :, None],
        exchange_ns(latency, [placed.rows], [received], [together.tolist()], [replicas]),
    )
    most = int(read.max())
    return MicroBatchCost(
        rows=placed.rows,
        keys=most,
        indexed=most if placed.ranks > 1 else 0,
        kept_rows=placed.rows if going_on else 0,
        by_mode=by_mode,
        segments=int(np.diff(placed.first).max()),
        going_on=going_on,
        ranks=placed.ranks,
    )


def most_of_a_rank(
    latency: LatencyModel, sharding: str, micro_batches: Sequence[Sequence[Slice]], ranks: int
) -> list[tuple[int, int]]:
    """``keys`` and ``segments`` of :class:`MicroBatchCost`, for each of several micro-batches.

    ``micro_batches``: the slices of each, at least one; ``ranks``: the size of context groups.
    """
    lengths = [np.array([part.tokens for part in slices]) for slices in micro_batches]
    before = np.array([part.context for slices in micro_batches for part in slices])
    table, first = chunks_of_each(sharding, lengths, ranks)
    _, piece, start, stop = table.T
    seen = stop - start + reach_of(latency.shape.sliding_window)
    read = np.diff(offsets(np.minimum(stop + before[piece], seen))[first])
    both = np.stack((read, np.diff(first)), axis=1).reshape(-1, ranks, 2).max(axis=1)
    return list(map(tuple, both.tolist()))


def exchange_ns(
    latency: LatencyModel,
    rows: Sequence[int],
    received: Sequence[int],
    keys: Sequence[Sequence[int]],
    replicas: Sequence[int],
) -> Integers:
    """Time in which ranks join keys and values, int64 [3, kinds, micro-batches, ranks].

    The three times are: in forward, in backward for the gradients, and in backward for keys that
    are joined again. Of messages only the part that layers wait for counts. A layer without
    attention exchanges its recurrence's input and output; only a recomputed forward repeats that.

    Args:
        rows: rows of each rank, for each micro-batch.
        received: rows that the busiest rank receives or sends, for each micro-batch.
        keys: rows that each rank puts in order, [micro-batches][ranks].
        replicas: how many replicas share each micro-batch.
    """

    def waits(kind: LatencyModel, rows: int, received: int, replicas: int) -> tuple[int, int, int]:
        if not kind.layer.attends:
            moved = kind.exchange_recurrence_ns(rows, replicas=replicas)
            return moved, moved, 0
        there = kind.exchange_keys_ns(received, 0, backward=False, replicas=replicas)
        back = kind.exchange_keys_ns(received, 0, backward=True, replicas=replicas)
        return exposed_keys(kind, rows, there, back)

    times = []
    for kind in latency.kinds:
        copies = [
            [
                [kind.exchange_keys_ns(0, each, backward=back) for each in of_ranks]
                for of_ranks in keys
            ]
            for back in PASSES
        ]
        waited = [waits(kind, *each) for each in zip(rows, received, replicas, strict=True)]
        times.append(np.array((*copies, copies[0]), np.int64) + np.array(waited).T[:, :, None])
    return np.stack(times, axis=1)


def times_by_mode(
    latency: LatencyModel, rows: Sequence[int], attention: Integers, exchange: Integers
) -> list[tuple[PassTimes, ...]]:
    """Times of micro-batches with each recomputation, in the order of :data:`MODES`.

    Args:
        rows: rows of each rank, for each micro-batch.
        attention: kernel times, int64 [2 (pass), kinds of layers, micro-batches, ranks].
        exchange: :func:`exchange_ns`, int64 [3, kinds of layers, micro-batches, ranks].
    """
    counts = np.array(list(latency.shape.kinds.values()))
    of_kinds = [list(map(kind.rows_ns, rows)) for kind in latency.kinds]
    forward, backward, *again = np.array(of_kinds, np.int64).transpose(2, 0, 1)
    (first, second), (fetches, gathers, fetches_again) = attention, exchange
    modes = []
    for mode, added in zip(MODES, again, strict=True):
        whole = mode == "full"
        attends = np.array((first, second + whole * first))
        moves = np.array((fetches, gathers + (fetches if whole else fetches_again)))
        layer_ns = np.array((forward, backward + added)) + (attends + moves).max(axis=-1)
        slowest = np.einsum("k,pkm->mp", counts, attends.max(axis=-1)) / counts.sum()
        mean = np.einsum("k,pkmr->mp", counts, attends) / (counts.sum() * attends.shape[-1])
        each = zip(
            slowest.tolist(), mean.tolist(), layer_ns.transpose(2, 1, 0).tolist(), strict=True
        )
        modes.append(
            [
                PassTimes((round(slow), round(back)), tuple(means), tuple(map(tuple, layers)))
                for (slow, back), means, layers in each
            ]
        )
    return list(zip(*modes, strict=True))


def _received_rows(placed: Layout, sliding_window: int | None) -> int:
    """Rows of keys that the group's busiest rank receives or sends if no piece is sliced."""
    if placed.ranks == 1 or not placed.shared:
        return 0
    moved = traffic(placed, sliding_window)
    if uses_all_to_all(placed, moved):
        return max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return (placed.ranks - 1) * placed.shared
