"""GPipe: every forward, then every backward (Huang et al., 2019).

With equal micro-batches of forward time f and backward time b a step takes
(P - 1 + M)·(f + b), as long as 1F1B; but all M micro-batches are open at once on every stage,
where 1F1B holds at most P. Use it as a baseline, or where M is small anyway.
"""

from __future__ import annotations

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The program of one stage.

    Args:
        stage: 0-based stage of the rank.
        stages: number of stages; the order is the same whatever it is.
        micro_batches: M, at least 0.
    """
    return [Action(stage, kind, m) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)]
