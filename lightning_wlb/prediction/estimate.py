"""What micro-batches will cost once they are laid out: without a layout, for a whole replica.

While a packing looks for the best plan, no sharding is chosen yet, because choosing one takes
longer than everything else. But that choice ends where ranks have equal rows and nearly equal
attention (:mod:`~lightning_wlb.sharding.choice`). So the mean rank stands here for the slowest: it
has as many rows as the others, and its part of everything else. A piece of less than 1/8 of a
rank's attention and 1/4 of its rows stays whole; a longer one is dealt to so many ranks that each
part is that small, or to all, as a chunk from the front and one from the back
(:mod:`~lightning_wlb.sharding.hybrid`).

On a single rank nothing is estimated. On more, a micro-batch takes mostly up to 2 % more than
estimated, and further above that the shorter its pieces are, as remainders and tiles do not divide
evenly (``tests/prediction/test_estimate.py``).

Cost: about 0.3 ms for a replica, and 40 µs per micro-batch and kind of layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from lightning_wlb.cost.kernel import TILE
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.prediction.micro_batch import PASSES, Exchange, by_mode, over_layers, reach_of
from lightning_wlb.prediction.step import MicroBatchCost
from lightning_wlb.sharding.arrays import Integers, offsets
from lightning_wlb.sharding.hybrid import LEAST_TILES
from lightning_wlb.sharding.indices import ALL_TO_ALL_PERCENT

CUT_ATTENTION = 8
"""A piece of more than 1/8 of a rank's attention is cut."""
CUT_ROWS = 4
"""And one of more than 1/4 of its rows."""


def estimated_costs(
    latency: LatencyModel, replica: ReplicaPlan, kept: Sequence[bool]
) -> list[MicroBatchCost]:
    """The costs of a replica's micro-batches, in forward order.

    Args:
        latency: of the model on the mesh.
        replica: as it is executed; its shardings and rows are not read.
        kept: whether later micro-batches read the keys of each.
    """
    every = _Slices(latency, replica)
    ranks, reach = every.ranks, reach_of(latency.shape.sliding_window)
    size = latency.mesh.tensor
    rows = -(every.sum_of(-every.tokens) // ranks // size) * size
    earlier = every.sum_of(np.minimum(every.context, reach))
    sliced = (every.sum_of(every.context) > 0) | np.array(kept, dtype=bool)
    gathered = (ranks - 1) * -(every.sum_of(-every.tokens * (every.parts > 1)) // ranks)
    moved = every.sum_of(every.tokens * (every.parts - 1)) // ranks
    travelling = np.where(
        sliced,
        (ranks - 1) * (rows - (-earlier // ranks)),
        np.where(100 * moved <= ALL_TO_ALL_PERCENT * gathered, moved, gathered),
    )
    keys = every.on_a_rank(
        np.minimum(every.near, every.queries + reach), np.minimum(every.far, every.queries + reach)
    )
    counts = every.on_a_rank(*2 * [np.ones_like(every.tokens)])
    exchanges = [
        Exchange(*numbers)
        for numbers in zip(
            travelling.tolist(),
            ranks.tolist(),
            earlier.tolist(),
            (len(each.replicas) for each in replica.forward),
            strict=True,
        )
    ]
    attention = [
        list(zip(*(every.attention_ns(kind, backward=each) for each in PASSES), strict=True))
        for kind in latency.kinds
    ]
    return [
        MicroBatchCost(
            rows=of_rank,
            keys=read,
            indexed=read if exchange.ranks > 1 else 0,
            kept_rows=of_rank if kept[at] else 0,
            by_mode=over_layers(
                latency,
                [
                    by_mode(kind, of_rank, [of_kind[at]], [exchange.ns(kind, read)], refetches=True)
                    for kind, of_kind in zip(latency.kinds, attention, strict=True)
                ],
            ),
            recompute=replica.forward[at].recompute,
            segments=segments,
        )
        for at, (of_rank, read, segments, exchange) in enumerate(
            zip(rows.tolist(), keys.tolist(), counts.tolist(), exchanges, strict=True)
        )
    ]


class _Slices:
    """The slices of a replica's micro-batches one after another, and what a rank has of each.

    Attributes:
        ranks: int64 [micro-batches], of the context-parallel group.
        tokens: int64 [slices], as are all that follow.
        context: tokens of the piece before the slice.
        parts: ranks that it lies on; as two chunks on each if they are several.
        queries: of a chunk, or of the whole slice.
        near: keys that the first chunk reads, or the whole slice.
        far: keys that the second chunk of the same rank reads.
    """

    def __init__(self, latency: LatencyModel, replica: ReplicaPlan) -> None:
        counts = np.array([len(each.slices) for each in replica.forward], dtype=np.int64)
        numbers = list(chain.from_iterable(each.slices for each in replica.forward))
        table = np.array(replica.slices, dtype=np.int64).reshape(-1, 4)[numbers]
        self._first = offsets(counts)
        self.ranks = latency.mesh.context * np.array(
            [len(each.replicas) for each in replica.forward], dtype=np.int64
        )
        self.tokens = table[:, 3] - table[:, 2]
        self.context = table[:, 2] - table[:, 1]
        ranks = np.repeat(self.ranks, counts)
        pairs = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        shares = np.maximum(
            -(-CUT_ROWS * self.tokens * ranks // np.repeat(self.sum_of(self.tokens), counts)),
            -(-CUT_ATTENTION * pairs * ranks // np.repeat(self.sum_of(pairs), counts)),
        )
        most = self.tokens // (LEAST_TILES * TILE)
        shares = np.where(most >= ranks, np.where(shares > 1, ranks, 1), np.minimum(shares, most))
        self.parts = np.clip(shares, 1, ranks)
        self.far = self.context + self.tokens
        two = 2 * self.parts
        self.queries = np.where(self.parts > 1, -(-self.tokens // two), self.tokens)
        self.near = self.context + self.queries

    def sum_of(self, values: Integers) -> Integers:
        """Of each micro-batch, of a value for each slice."""
        return np.diff(offsets(values)[self._first])

    def on_a_rank(self, near: Integers, far: Integers) -> Integers:
        """What the mean rank of each micro-batch has, of a value for each segment."""
        both = np.where(self.parts > 1, near + far, near)
        mean: Integers = self.sum_of(both * self.parts) // self.ranks
        return mean

    def attention_ns(self, kind: LatencyModel, *, backward: bool) -> list[int]:
        """The attention kernel of a layer, of each micro-batch on the mean rank."""
        near = kind.segments_ps(self.queries, self.near, backward=backward)
        far = np.zeros_like(near)
        cut = self.parts > 1
        far[cut] = kind.segments_ps(self.queries[cut], self.far[cut], backward=backward)
        call = kind.call_ns(backward=backward) * (np.diff(self._first) > 0)
        times: list[int] = (self.on_a_rank(near, far) // 1000 + call).tolist()
        return times
