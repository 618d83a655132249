"""Which sharding a micro-batch gets: the one of least predicted latency (WLB-LLM §5.3).

Ranks wait for each other, so a sharding is as fast as its slowest rank: the sum of the predicted
kernel costs of that rank's segments. The paper chooses between two shardings by a device profile;
here any cost of segments may drive the choice.

Candidates are tried in order, and the first one within 2 % of the ideal (whole pieces on equally
loaded ranks) ends the search: no prediction is better than that, and the first candidates send
least.

Cost: one layout for each candidate tried. Not for a run whose shardings must be alike in all
micro-batches: name one instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_wlb.cost.kernel import SegmentCost, reference_kernel_cost
from lightning_wlb.sharding.arrays import offsets
from lightning_wlb.sharding.layout import Layout, layout

ADAPTIVE = "adaptive"
"""The name that stands for this choice where a sharding is asked for."""

CANDIDATES = ("hybrid", "per_document_contiguous", "per_sequence", "ptrr")
"""Every sharding by keys but ``per_document``, whose contiguous form has better tiles."""

IDEAL_PERCENT = 102
"""Predicted latency at which the search ends, in percent of the ideal."""


def predicted_latency(
    layout: Layout,
    cost: SegmentCost = reference_kernel_cost,
    contexts: Sequence[int] | None = None,
) -> int:
    """Cost of the slowest rank's segments, in the unit of ``cost``.

    Args:
        layout: of a micro-batch.
        cost: of segments.
        contexts: tokens in front of each of the layout's pieces that its queries see too, where
            the pieces are slices; none if None.
    """
    _, document, start, stop = layout.table.T
    keys = stop if contexts is None else stop + np.array(contexts, dtype=np.int64)[document]
    sums = offsets(cost(stop - start, keys))
    return int(np.diff(sums[layout.first]).max())


def choose(
    lengths: Sequence[int],
    context_parallel_size: int,
    tensor_parallel_size: int,
    cost: SegmentCost = reference_kernel_cost,
    candidates: Sequence[str] = CANDIDATES,
    contexts: Sequence[int] | None = None,
) -> tuple[str, Layout]:
    """The sharding of least predicted latency and its layout; of equal ones the first candidate.

    Args:
        lengths: length in tokens of each piece.
        context_parallel_size: ranks of the group.
        tensor_parallel_size: the padded rows are a multiple of it.
        cost: of segments, forward and backward together.
        candidates: names in :data:`.SHARDINGS`, at least one, in the order in which to try them.
        contexts: as of :func:`predicted_latency`; no sharding knows of them, but the choice does.

    Raises:
        ValueError: as :func:`.layout`.
    """
    sizes = np.array(lengths, dtype=np.int64).reshape(-1)
    before = 0 if contexts is None else np.array(contexts, dtype=np.int64)
    ideal = int(cost(sizes, sizes + before).sum())
    best: tuple[int, str, Layout] | None = None
    for name in candidates:
        made = layout(name, lengths, context_parallel_size, tensor_parallel_size)
        latency = predicted_latency(made, cost, contexts)
        if best is None or latency < best[0]:
            best = latency, name, made
        if 100 * context_parallel_size * latency <= IDEAL_PERCENT * ideal:
            break
    assert best is not None
    return best[1:]
