"""Which sharding a micro-batch gets: the one with the least predicted latency (WLB-LLM §5.3).

Ranks wait for each other, so a sharding is as fast as its slowest rank: the sum of the predicted
kernel costs of that rank's segments, forward and backward. The paper chooses between two
shardings by a device profile; any cost of segments drives this choice, the reference kernel cost
unless another is given.

Cost: every candidate is laid out once; 1 ms for 128K tokens on 16 ranks. Not for a run whose
shardings must be alike in all micro-batches: name one instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_wlb.attention.sharding.arrays import offsets
from lightning_wlb.attention.sharding.layout import SHARDINGS, Layout, layout
from lightning_wlb.cost.kernel import SegmentCost, reference_kernel_cost

ADAPTIVE = "adaptive"
"""The name that stands for the choice where a sharding is asked for."""


def predicted_latency(layout: Layout, cost: SegmentCost = reference_kernel_cost) -> int:
    """Cost of the slowest rank's segments, in the unit of ``cost``."""
    queries = layout.table[:, 3] - layout.table[:, 2]
    sums = offsets(cost(queries, layout.table[:, 3]))
    return int(np.diff(sums[layout.first]).max())


def choose(
    lengths: Sequence[int],
    context_parallel_size: int,
    tensor_parallel_size: int,
    cost: SegmentCost = reference_kernel_cost,
    candidates: Sequence[str] = tuple(SHARDINGS),
) -> tuple[str, Layout]:
    """The sharding of least predicted latency and its layout; ties go by order of candidates.

    Args:
        lengths: length in tokens of each piece.
        context_parallel_size: ranks of the group.
        tensor_parallel_size: the padded rows are a multiple of it.
        cost: of segments, forward and backward together.
        candidates: names in :data:`SHARDINGS`, at least one.

    Raises:
        ValueError: as :func:`.layout`.
    """
    if context_parallel_size == 1:
        candidates = candidates[:1]  # all the same
    made = [
        layout(name, lengths, context_parallel_size, tensor_parallel_size) for name in candidates
    ]
    costs = [predicted_latency(each, cost) for each in made]
    best = costs.index(min(costs))
    return candidates[best], made[best]
