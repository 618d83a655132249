"""The predicted latency of one layout: what benchmarks and tests compare shardings by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_wlb.cost.attention_tiles import SegmentCost, reference_kernel_cost
from lightning_wlb.sharding import Layout
from lightning_wlb.sharding.integer_ranges import offsets


def predicted_latency(
    layout: Layout,
    cost: SegmentCost = reference_kernel_cost,
    contexts: Sequence[int] | None = None,
) -> int:
    """Cost of the slowest rank's segments, in the unit of ``cost``.

    Args:
        layout: how a micro-batch lies on the group.
        cost: what segments cost.
        contexts: tokens in front of each of the layout's pieces that its queries see too, where
            the pieces are slices; none if None.
    """
    _, document, start, stop = layout.table.T
    keys = stop if contexts is None else stop + np.array(contexts, dtype=np.int64)[document]
    sums = offsets(cost(stop - start, keys))
    return int(np.diff(sums[layout.first]).max())
