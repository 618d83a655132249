"""Estimated costs of micro-batches before they are laid out, many at a time.

While a packing looks for the best plan, no sharding is chosen yet, because choosing one takes
longer than everything else. The sharding that is chosen in the end gives ranks equal rows and
nearly equal attention (:mod:`~lightning_wlb.sharding.adaptive`). So the mean rank stands here for
the slowest rank. A piece with less than 1/8 of a rank's attention and 1/4 of its rows is assumed to
stay whole. A longer piece is spread over so many ranks that each part is that small, or over all
ranks; each part is a chunk from the front and one from the back (:mod:`.sharding.hybrid`).

On a single rank the estimate is exact. On several ranks, a micro-batch mostly takes up to 2 % more
than estimated. The error grows for shorter pieces, as remainders and tiles do not divide evenly.

Cost: about 0.2 ms for a call, and 20 µs per micro-batch and kind of layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_wlb.cost.attention_tiles import TILE
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import ReplicaPlan, Slice
from lightning_wlb.prediction.micro_batch import MicroBatchCost, exchange_ns, times_by_mode
from lightning_wlb.sharding.hybrid import LEAST_TILES
from lightning_wlb.sharding.integer_ranges import Integers, offsets, reach_of
from lightning_wlb.sharding.rank_indices import ALL_TO_ALL_PERCENT

MOST_REMEMBERED = 1 << 12
"""Costs that are remembered: enough for the micro-batches tried in a step on a thousand ranks."""
CUT_ATTENTION = 8
"""A piece with more than 1/8 of a rank's attention is cut. With this and :data:`CUT_ROWS`, steps of
long documents are estimated within 4 % (``tests/prediction/test_estimate.py``)."""
CUT_ROWS = 4
"""A piece with more than 1/4 of a rank's rows is cut."""


class UnplacedMicroBatch(NamedTuple):
    """The properties of a micro-batch on which its estimated cost depends."""

    slices: tuple[Slice, ...]
    replicas: int  #: how many replicas share it
    going_on: int  #: pieces that have slices in later micro-batches, which read its keys


class Estimates:
    """Estimated costs, remembered because the plans of a search share most micro-batches."""

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self._known: dict[UnplacedMicroBatch, MicroBatchCost] = {}

    def of(self, replica: ReplicaPlan) -> list[MicroBatchCost]:
        """The costs of a replica's micro-batches; its shardings and rows are not read."""
        asked = [
            UnplacedMicroBatch(replica.slices_of(each), len(each.replicas), going_on)
            for each, going_on in zip(replica.forward, replica.going_on, strict=True)
        ]
        missing = {each for each in asked if each not in self._known}
        if len(self._known) + len(missing) > MOST_REMEMBERED:
            self._known.clear()
            missing.update(asked)
        if missing:
            order = list(missing)
            self._known.update(zip(order, estimated_costs(self._latency, order), strict=True))
        return [
            self._known[each]._replace(recompute=micro_batch.recompute)
            for each, micro_batch in zip(asked, replica.forward, strict=True)
        ]


def estimated_costs(
    latency: LatencyModel, micro_batches: Sequence[UnplacedMicroBatch]
) -> list[MicroBatchCost]:
    """The cost of each micro-batch without recomputation, on the mean rank."""
    every = _Slices(latency, micro_batches)
    ranks, reach = every.ranks, reach_of(latency.shape.sliding_window)
    size = latency.mesh.tensor
    kept = np.array([each.going_on for each in micro_batches], dtype=bool)
    tokens, context, earlier, in_parts, moved = every.sums_of(
        every.tokens,
        every.context,
        np.minimum(every.context, reach),
        every.tokens * (every.parts > 1),
        every.tokens * (every.parts - 1),
    )
    rows = -(-tokens // ranks // size) * size
    gathered = (ranks - 1) * -(-in_parts // ranks)
    moved = moved // ranks
    received = np.where(
        (context > 0) | kept,
        (ranks - 1) * (rows - (-earlier // ranks)),
        np.where(100 * moved <= ALL_TO_ALL_PERCENT * gathered, moved, gathered),
    )
    seen = every.queries + reach
    ones = np.ones_like(every.tokens)
    keys, counts = every.on_a_rank(
        np.array((np.minimum(every.near, seen), ones)),
        np.array((np.minimum(every.far, seen), ones)),
    )
    together = np.where((ranks > 1) | (earlier > 0), keys, 0)
    exchange = exchange_ns(
        latency,
        rows.tolist(),
        received.tolist(),
        together[:, None].tolist(),
        [each.replicas for each in micro_batches],
    )
    attention = np.stack([every.attention_ns(kind) for kind in latency.kinds], axis=1)
    by_mode = times_by_mode(latency, rows.tolist(), attention[..., None], exchange)
    sizes = rows, keys, np.where(ranks > 1, keys, 0), np.where(kept, rows, 0), counts, ranks
    return [
        MicroBatchCost(
            of_rank,
            read,
            indexed,
            kept_rows,
            modes,
            segments=segments,
            going_on=each.going_on,
            ranks=group,
        )
        for each, of_rank, read, indexed, kept_rows, segments, group, modes in zip(
            micro_batches, *(column.tolist() for column in sizes), by_mode, strict=True
        )
    ]


class _Slices:
    """The concatenated slices of some micro-batches, and the parts of them that a rank has.

    Attributes:
        ranks: int64 [micro-batches], ranks of the context-parallel group.
        tokens: int64 [slices], tokens of each slice. All following arrays have the same shape.
        context: tokens of the piece before the slice.
        parts: ranks that the slice lies on; if there are several, each has two chunks.
        queries: queries of a chunk, or of a whole slice on one rank.
        near: keys that a rank's first chunk reads, or a whole slice on one rank.
        far: keys that a rank's second chunk reads.
    """

    def __init__(self, latency: LatencyModel, micro_batches: Sequence[UnplacedMicroBatch]) -> None:
        counts = np.array([len(each.slices) for each in micro_batches], dtype=np.int64)
        numbers = chain.from_iterable(chain.from_iterable(each.slices for each in micro_batches))
        table = np.fromiter(numbers, np.int64, 4 * int(counts.sum())).reshape(-1, 4)
        self._first = offsets(counts)
        self.ranks = latency.mesh.context * np.array(
            [each.replicas for each in micro_batches], dtype=np.int64
        )
        self.tokens = table[:, 3] - table[:, 2]
        self.context = table[:, 2] - table[:, 1]
        ranks = np.repeat(self.ranks, counts)
        pairs = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        tokens_of_all, pairs_of_all = np.repeat(self.sums_of(self.tokens, pairs), counts, axis=1)
        shares = np.maximum(
            -(-CUT_ROWS * self.tokens * ranks // tokens_of_all),
            -(-CUT_ATTENTION * pairs * ranks // pairs_of_all),
        )
        most = self.tokens // (LEAST_TILES * TILE)
        shares = np.where(most >= ranks, np.where(shares > 1, ranks, 1), np.minimum(shares, most))
        self.parts = np.clip(shares, 1, ranks)
        self.far = self.context + self.tokens
        two = 2 * self.parts
        self.queries = np.where(self.parts > 1, -(-self.tokens // two), self.tokens)
        self.near = self.context + self.queries

    def sums_of(self, *values: Integers) -> Integers:
        """Values of each slice added up per micro-batch, int64 [values, micro-batches]."""
        sums = np.zeros((len(values), len(self.tokens) + 1), dtype=np.int64)
        np.cumsum(values, axis=1, out=sums[:, 1:])
        return np.diff(sums[:, self._first])

    def on_a_rank(self, near: Integers, far: Integers) -> Integers:
        """The total of the mean rank of each micro-batch, int64 [..., micro-batches].

        ``near``, ``far``: values of the first and second chunk of each slice, int64 [..., slices].
        """
        both = np.where(self.parts > 1, near + far, near)
        return self.sums_of(*(both * self.parts)) // self.ranks

    def attention_ns(self, kind: LatencyModel) -> Integers:
        """A layer's attention kernel on the mean rank, int64 [2 (pass), micro-batches]."""
        cut = self.parts > 1
        queries = np.concatenate((self.queries, self.queries[cut]))
        keys = np.concatenate((self.near, self.far[cut]))
        longest = np.maximum.reduceat(
            np.array((np.append(self.far, 0), np.append(self.queries, 0))), self._first[:-1], axis=1
        )
        times = kind.calls_ns(queries, keys, longest, lambda each: self._of_chunks(each, cut))
        return times * (np.diff(self._first) > 0)

    def _of_chunks(self, values: Integers, cut: npt.NDArray[np.bool_]) -> Integers:
        """:meth:`on_a_rank` of values [2, chunks] of all first chunks, then all second chunks."""
        far = np.zeros((2, len(cut)), dtype=np.int64)
        far[:, cut] = values[:, len(cut) :]
        return self.on_a_rank(values[:, : len(cut)], far)
