"""How long a 1F1B pipeline takes over micro-batches of unlike cost, for planning.

The same recurrence as the simulator's (``lightning_wlb.schedule.simulate`` over
``schedule.one_f_one_b``), without its timeline: communication and per-action overhead are left
out, and every stage takes the same time for a micro-batch. Stage p begins with P - 1 - p forwards,
then runs a forward and a backward in turn; the order of backward is that of forward.

Cost: 4·M·P additions and comparisons, 10 µs for 8 micro-batches on 4 stages.
"""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_time(forward: Sequence[int], backward: Sequence[int], stages: int) -> int:
    """Time from the first forward to the last backward.

    Args:
        forward: of each micro-batch on one stage, in the order in which they run.
        backward: likewise.
        stages: depth of the pipeline, P.

    Returns:
        In the unit of the arguments; 0 without micro-batches.
    """
    count = len(forward)
    clock = [0] * stages
    ready = [0] * count  # when the gradient of a micro-batch arrives at the stage before
    last = stages - 1
    # In each round every stage runs the next forward, and then, from the last stage upwards, the
    # backward of the micro-batch that left it P - 1 - p rounds ago.
    for turn in range(count + last):
        if turn < count:
            arrived, duration = 0, forward[turn]
            for stage in range(stages):
                begin = clock[stage]
                if arrived > begin:
                    begin = arrived
                arrived = clock[stage] = begin + duration
        index = turn
        for stage in range(last, -1, -1):
            if index < 0:
                break
            if index < count:
                begin = clock[stage]
                if ready[index] > begin:
                    begin = ready[index]
                ready[index] = clock[stage] = begin + backward[index]
            index -= 1
    return max(clock)


def time_bound(total: int, longest: int, stages: int) -> int:
    """No order and grouping of pieces runs through a pipeline in less.

    Args:
        total: forward and backward cost of all pieces on one stage.
        longest: of the costliest piece, which passes every stage twice.
        stages: depth of the pipeline.
    """
    return max(total, stages * longest)
