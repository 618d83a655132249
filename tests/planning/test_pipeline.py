"""The planner's pipeline time is the simulator's, and its bounds are bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.pipeline import pipeline_time, time_bound
from lightning_wlb.schedule.actions import BACKWARD
from lightning_wlb.schedule.registry import make_programs
from lightning_wlb.schedule.simulate import simulate

jobs = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), max_size=12)


@given(jobs=jobs, stages=st.integers(1, 6))
def test_equals_the_simulation_of_1f1b(jobs, stages) -> None:
    def duration(action) -> int:
        return jobs[action.micro_batch][action.kind == BACKWARD]

    simulated = simulate(make_programs("1f1b", stages, len(jobs)), duration).total_ns
    forward, backward = [job[0] for job in jobs], [job[1] for job in jobs]
    assert pipeline_time(forward, backward, stages) == simulated


def test_equal_micro_batches() -> None:
    for stages in (1, 2, 5):
        assert pipeline_time([3] * 7, [6] * 7, stages) == (stages - 1 + 7) * 9
    assert pipeline_time([], [], 3) == 0


def test_order_matters() -> None:
    """One heavy micro-batch among light ones: first, last, and in the middle (by hand)."""
    # Stage 0: F0 to 4, F1 to 5, B0 from 16 to 24, F2 to 25, B1 to 27, B2 from 28 to 30;
    # stage 1: F0 to 8, B0 to 16, F1 to 17, B1 to 19, F2 from 25 to 26, B2 to 28.
    assert pipeline_time([4, 1, 1], [8, 2, 2], 2) == 30
    light_first = pipeline_time([1, 2, 4, 2], [2, 4, 8, 4], 3)
    heavy_first = pipeline_time([4, 2, 2, 1], [8, 4, 4, 2], 3)
    assert light_first < heavy_first


@given(jobs=jobs.filter(bool), stages=st.integers(1, 6))
def test_bound(jobs, stages) -> None:
    forward, backward = [job[0] for job in jobs], [job[1] for job in jobs]
    total, longest = sum(map(sum, jobs)), max(map(sum, jobs))
    time = pipeline_time(forward, backward, stages)
    assert time >= time_bound(total, longest, stages)
    assert time <= stages * total
