"""The integer programs are at least as good as greed, and name a missing solver."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing.ilp import Problem, heaviest_of, require, solve
from tests.planning.packing.test_fixed import WORK, work

solvers = [
    "cbc",
    pytest.param(
        "highs",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("highspy") is None, reason="highspy is not installed"
        ),
    ),
]


@pytest.mark.parametrize("solver", solvers)
def test_solver_finds_what_greed_misses(solver) -> None:
    """Longest first gives 3+2+2 | 3+2 = 7; the optimum is 3+3 | 2+2+2 = 6."""
    problem = Problem([3, 3, 2, 2, 2], [1] * 5, 2, 5)
    assert problem.bound == 6
    # Of three heavy pieces two share one of two micro-batches.
    assert Problem([5, 1, 5, 5], [1] * 4, 2, 5).bound == 10
    answer = solve(problem, solver, 1000, None)
    assert heaviest_of(problem, answer) == 6
    assert answer == solve(problem, solver, 1000, None)
    # The limit on tokens is kept: three to one micro-batch at most, and then not more than 6.
    tight = Problem([3, 3, 2, 2, 2], [1, 1, 1, 1, 1], 2, 3)
    assert heaviest_of(tight, solve(tight, solver, 1000, None)) == 6


@pytest.mark.parametrize("solver", solvers)
def test_solver_starts_from_an_answer_and_never_gets_worse(solver) -> None:
    weights = [(7 * n) % 23 + 1 for n in range(24)]
    start = [n % 3 for n in range(24)]
    problem = Problem(weights, [1] * 24, 3, 10)
    answer = solve(problem, solver, 20, start)
    assert heaviest_of(problem, answer) <= heaviest_of(problem, start)


@pytest.mark.parametrize("solver", solvers)
def test_impossible_is_none(solver) -> None:
    assert solve(Problem([1, 1, 1], [1, 1, 1], 2, 1), solver, 10, None) is None


@pytest.mark.parametrize(("method", "heaviest"), [("fixed_ilp", 230), ("varlen_ilp", 234)])
def test_programs_are_at_least_as_good_as_greed_and_say_the_gap(method, heaviest, caplog) -> None:
    lengths = [3, 3, 2, 2, 2, 4, 4]  # 20 tokens: two windows of ten
    data = DataSettings(10, 2, packing={"method": method, "solver_nodes": 1000}, shuffle=False)
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


def test_missing_solver_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require("cbc")
    with pytest.raises(ModuleNotFoundError, match=r"needs highspy.*pip install "):
        require("highs")
    data = DataSettings(10, 2, packing={"method": "fixed_ilp", "solver": "highs"})
    with pytest.raises(ModuleNotFoundError, match="solver='highs' needs highspy"):
        Planner([5], data, WORK)
