"""The schedules of the field, written as their papers have them: what PackFlow is held to."""

from __future__ import annotations

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.schedule.packflow import rounds_of


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The program of one stage.

    Args:
        stage: 0-based stage of the rank.
        stages: number of stages, at least 1.
        micro_batches: M, at least 0.
    """
    warm_up = min(micro_batches, stages - 1 - stage)
    program = [Action(stage, FORWARD, index) for index in range(warm_up)]
    for index in range(warm_up, micro_batches):
        program.append(Action(stage, FORWARD, index))
        program.append(Action(stage, BACKWARD, index - warm_up))
    program += [
        Action(stage, BACKWARD, index) for index in range(micro_batches - warm_up, micro_batches)
    ]
    return program


def interleaved(rank: int, ranks: int, micro_batches: int, virtual_stages: int = 2) -> list[Action]:
    """The program of one rank; stage numbers count over all ranks.

    Args:
        rank: 0-based pipeline rank.
        ranks: P, at least 1.
        micro_batches: M, at least 0.
        virtual_stages: V, at least 1. With 1 the order is valid, but 1F1B opens less.
    """
    rounds = rounds_of(micro_batches, ranks)
    stages = range(rank, rank + virtual_stages * ranks, ranks)
    forward = [
        Action(stage, FORWARD, micro_batch)
        for round_ in rounds
        for stage in stages
        for micro_batch in round_
    ]
    backward = [
        Action(stage, BACKWARD, micro_batch)
        for round_ in rounds
        for stage in reversed(stages)
        for micro_batch in round_
    ]
    largest = max(map(len, rounds))
    warm_up = min(len(forward), 2 * (ranks - 1 - rank) + (virtual_stages - 1) * largest)
    program = forward[:warm_up]
    for action, partner in zip(forward[warm_up:], backward, strict=False):
        program += (action, partner)
    return program + backward[len(forward) - warm_up :]
