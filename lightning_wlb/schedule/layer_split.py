"""Which layers each pipeline stage owns: by cost, not by count.

The output head belongs to the last stage and counts: over a large vocabulary it costs as much as
several layers. The split is the contiguous partition whose most expensive stage is cheapest, and
among those the one with more layers in earlier stages. It is found by dynamic programming in
O(stages · layers²).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def split_stages(costs: Sequence[int], stages: int) -> list[range]:
    """Layers of each stage, as ranges of global layer numbers.

    Args:
        costs: cost of each layer, the last one's with the head, in any unit (FLOPs per token).

    Raises:
        ValueError: there are fewer layers than stages, or no stage.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"{count} layers cannot be split into {stages} pipeline stages"
            " (pipeline_parallel_size, times virtual_pipeline_size): every stage needs at least"
            f" one layer. Use at most {count} stages, or a deeper model."
        )
    prefix = [0, *accumulate(costs)]

    @cache
    def best(stage: int, first: int) -> tuple[int, int]:
        """(cost of the most expensive stage from here on, minus the layer where this one stops)."""
        if stage == stages - 1:
            return prefix[count] - prefix[first], -count
        return min(
            (max(prefix[stop] - prefix[first], best(stage + 1, stop)[0]), -stop)
            for stop in range(first + 1, count - (stages - 1 - stage) + 1)
        )

    result, first = [], 0
    for stage in range(stages):
        stop = -best(stage, first)[1]
        result.append(range(first, stop))
        first = stop
    return result
