"""The pipeline schedules by name.

One line of :data:`SCHEDULES` registers another. Each makes the program of one rank from
(rank, ranks, micro-batches, stages per rank), and the tests hold every one of them to
:func:`~lightning_wlb.schedule.actions.check_schedule`.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.gpipe import gpipe
from lightning_wlb.schedule.interleaved import interleaved
from lightning_wlb.schedule.one_f_one_b import one_f_one_b

Schedule = Callable[[int, int, int, int], list[Action]]
"""(rank, ranks, micro-batches, stages per rank) -> the rank's program."""


def _whole_stages(program: Callable[[int, int, int], list[Action]], name: str) -> Schedule:
    """A schedule for one stage per rank, which refuses more."""

    def make(rank: int, ranks: int, micro_batches: int, stages_per_rank: int) -> list[Action]:
        if stages_per_rank != 1:
            raise ValueError(
                f"schedule {name!r} runs one stage per rank, not {stages_per_rank}: use"
                " 'interleaved' for several."
            )
        return program(rank, ranks, micro_batches)

    return make


SCHEDULES: dict[str, Schedule] = {
    "1f1b": _whole_stages(one_f_one_b, "1f1b"),
    "gpipe": _whole_stages(gpipe, "gpipe"),
    "interleaved": interleaved,
}


def make_program(
    schedule: str, rank: int, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> list[Action]:
    """What one rank does in a step.

    Args:
        schedule: a name in :data:`SCHEDULES`.
        rank: 0-based rank of the pipeline.
        ranks: number of ranks of the pipeline, at least 1.
        micro_batches: how many pass through the pipeline, at least 0.
        stages_per_rank: at least 1; rank r of P owns stages r, r + P, r + 2P, ...

    Raises:
        ValueError: if the schedule is unknown or cannot run so many stages per rank.
    """
    make = SCHEDULES.get(schedule)
    if make is None:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if stages_per_rank < 1:
        raise ValueError(f"stages_per_rank={stages_per_rank}: a rank runs at least one stage.")
    return make(rank, ranks, micro_batches, stages_per_rank)


def make_programs(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> list[list[Action]]:
    """The programs of all ranks of a pipeline, see :func:`make_program`."""
    return [
        make_program(schedule, rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks)
    ]
