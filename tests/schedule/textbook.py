"""1F1B as its paper has it: what PackFlow is held to."""

from __future__ import annotations

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action


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
