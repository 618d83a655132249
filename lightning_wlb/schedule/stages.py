"""Which layers each pipeline stage owns: by cost, not by count.

The embedding joins the first stage and the output head the last, and both weigh: a head over a
large vocabulary costs as much as several layers. The split is the contiguous partition that
minimises the dearest stage, and among those the one whose earlier stages are fuller (they hold
no head). Dynamic programme, O(stages · layers²): microseconds for any real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def split_stages(
    layers: Sequence[int], stages: int, *, embedding: int = 0, head: int = 0
) -> list[range]:
    """Layers of each stage, as ranges of global layer numbers.

    Args:
        layers: cost of each layer, any unit (FLOPs per token).
        stages: number of pipeline stages.
        embedding: cost added to the first stage, in the same unit.
        head: cost added to the last stage, in the same unit.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(
            f"{count} layers cannot be split into {stages} pipeline stages"
            " (pipeline_parallel_size, times virtual_pipeline_size): every stage needs at least"
            f" one layer. Use at most {count} stages, or a deeper model."
        )
    prefix = [0]
    for cost in layers:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, first: int, stop: int) -> int:
        ends = (embedding if stage == 0 else 0) + (head if stage == stages - 1 else 0)
        return prefix[stop] - prefix[first] + ends

    @cache
    def best(stage: int, first: int) -> tuple[int, int]:
        """(dearest stage from here on, where this stage stops)."""
        if stage == stages - 1:
            return stage_cost(stage, first, count), count
        options = range(first + 1, count - (stages - 1 - stage) + 1)
        return min(
            (
                (max(stage_cost(stage, first, stop), best(stage + 1, stop)[0]), stop)
                for stop in options
            ),
            key=lambda choice: (choice[0], -choice[1]),
        )

    result, first = [], 0
    for stage in range(stages):
        stop = best(stage, first)[1]
        result.append(range(first, stop))
        first = stop
    return result
