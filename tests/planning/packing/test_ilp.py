"""The integer programs are at least as good as greed, and never worse than what they start from."""

from __future__ import annotations

import logging

import pytest

from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.integer_program import Problem, heaviest_of, solve
from tests.planning.packing.test_baselines import WORK, work


def test_solver_finds_what_greed_misses() -> None:
    """Longest first gives 3+2+2 | 3+2 = 7; the optimum is 3+3 | 2+2+2 = 6."""
    problem = Problem([3, 3, 2, 2, 2], [1] * 5, 2, 5)
    assert problem.bound == 6
    # Of three heavy pieces two share one of two micro-batches.
    assert Problem([5, 1, 5, 5], [1] * 4, 2, 5).bound == 10
    answer = solve(problem)
    assert heaviest_of(problem, answer) == 6
    assert answer == solve(problem)
    # The limit on tokens is kept: three to one micro-batch at most, and then not more than 6.
    tight = Problem([3, 3, 2, 2, 2], [1, 1, 1, 1, 1], 2, 3)
    assert heaviest_of(tight, solve(tight)) == 6


def test_impossible_is_none() -> None:
    assert solve(Problem([1, 1, 1], [1, 1, 1], 2, 1)) is None


@pytest.mark.parametrize(("method", "heaviest"), [("fixed_ilp", 230), ("varlen_ilp", 234)])
def test_programs_are_at_least_as_good_as_greed_and_say_the_gap(method, heaviest, caplog) -> None:
    lengths = [3, 3, 2, 2, 2, 4, 4]  # 20 tokens: two windows of ten
    data = DataSettings(10, 2, packing=method, shuffle=False)
    with caplog.at_level(logging.INFO):
        plan = Planner(lengths, data, WORK).next_step()
    assert "above the optimum" in caplog.text
    loads = [
        sum(work(part.tokens) for part in replica.slices_of(micro_batch))
        for replica in plan.replicas
        for micro_batch in replica.forward
    ]
    # Of 462. Whole pieces: 4+3+3 | 4+2+2+2 = 234 | 228. Greed cuts a piece of two: 4+3+2+1 twice.
    assert max(loads) == heaviest
