"""Fixed-length and best-fit packing, windows of global batches, and the integer programs."""

from __future__ import annotations

import importlib.util
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import Piece
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing import best_fit, fixed_greedy
from lightning_wlb.planning.packing.solver import Problem, heaviest_of, require, solve


def pieces_of(lengths) -> list[Piece]:
    return [Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths)]


def tokens_of(groups) -> list[list[int]]:
    return [[piece.tokens for piece in group] for group in groups]


def work(tokens: int) -> int:
    return tokens * (tokens + 20)


def test_greedy_balances_squares_and_cuts_what_is_left() -> None:
    # 8 | 6 -> 64, 36; 5 fits neither 2 nor 4... room 2 and 4: 5 is cut into 4 and 1.
    groups = fixed_greedy.pack(pieces_of([5, 8, 6]), 2, 10)
    assert groups == [
        [Piece(1, 0, 8, 0), Piece(0, 4, 5, 0)],
        [Piece(2, 0, 6, 0), Piece(0, 0, 4, 0)],
    ]
    # 7 to 0 (49), 5 to 1 (25), 4 to 1 (41), 3 to 0: 10 | 9, and 1 to 1.
    assert tokens_of(fixed_greedy.pack(pieces_of([1, 3, 4, 5, 7]), 2, 10)) == [[7, 3], [5, 4, 1]]


@given(lengths=st.lists(st.integers(1, 20), max_size=40), spare=st.integers(0, 3))
def test_greedy_loses_nothing_and_fills_exactly(lengths, spare) -> None:
    bins = -(-sum(lengths) // 20) + spare
    groups = fixed_greedy.pack(pieces_of(lengths), bins, 20)
    assert len(groups) == bins
    assert all(sum(tokens) <= 20 for tokens in tokens_of(groups))
    parts = sorted(piece for group in groups for piece in group)
    for number, length in enumerate(lengths):
        own = [piece for piece in parts if piece.document == number]
        assert own[0].origin == 0
        assert own[-1].stop == length
        assert all(a.stop == b.origin for a, b in pairwise(own))


def test_windows_run_like_micro_batches_together() -> None:
    # Four windows of ten tokens: work of [10], [9, 1], [5, 5], [2]*5 descends.
    lengths = [10, 2, 2, 2, 2, 2, 5, 5, 9, 1]
    data = DataSettings(10, 2, packing="fixed_greedy", packing_window=2, shuffle=False)
    planner = Planner(lengths, data, work)
    first, second = planner.next_step(), planner.next_step()
    loads = [
        sorted(sum(work(part.tokens) for part in replica.slices_of(group)) for group in
               replica.forward)
        for plan in (first, second)
        for replica in plan.replicas
    ]  # fmt: skip
    assert loads[0][0] >= loads[1][-1]
    assert [first.tokens, second.tokens] == [20, 20]
    assert [first.max_delay, second.max_delay] == [0, 1]
    assert planner.next_step() is None


def test_a_window_that_the_epoch_cuts_short() -> None:
    data = DataSettings(10, 2, packing="fixed_greedy", packing_window=4, shuffle=False)
    planner = Planner([10, 10, 10, 3], data, work)
    plans = [planner.next_step() for _ in range(2)]
    assert [plan.tokens for plan in plans] == [20, 13]
    assert planner.next_step() is None


def test_best_fit_by_hand() -> None:
    # 7; 6; 4 into 6's; 3 into 7's; 3 opens; 2 into 3's.
    assert tokens_of(best_fit.pack(pieces_of([3, 7, 2, 6, 4, 3]), 10)) == [[7, 3], [6, 4], [3, 2]]
    with pytest.raises(ValueError, match="11 tokens, more than the cap of 10"):
        best_fit.pack(pieces_of([11]), 10)


@given(lengths=st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_is_the_definition(lengths) -> None:
    groups: list[list[int]] = []
    for tokens in sorted(lengths, reverse=True):
        fitting = [index for index in range(len(groups)) if sum(groups[index]) + tokens <= 20]
        if fitting:
            groups[max(fitting, key=lambda index: (sum(groups[index]), -index))].append(tokens)
        else:
            groups.append([tokens])
    assert tokens_of(best_fit.pack(pieces_of(lengths), 20)) == groups


# --- integer programs -----------------------------------------------------------------------

solvers = [
    "cbc",
    pytest.param(
        "highs",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("highspy") is None, reason="highspy not installed"
        ),
    ),
]


@pytest.mark.parametrize("solver", solvers)
def test_solver_finds_what_greed_misses(solver) -> None:
    """Longest first gives 3+2+2 | 3+2 = 7; the optimum is 3+3 | 2+2+2 = 6."""
    problem = Problem([3, 3, 2, 2, 2], [1] * 5, 2, 5)
    assert problem.bound == 6
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
    data = DataSettings(10, 2, packing=method, shuffle=False, solver_nodes=1000)
    with caplog.at_level(logging.INFO):
        plan = Planner(lengths, data, work).next_step()
    assert "above the optimum" in caplog.text
    loads = [
        sum(work(part.tokens) for part in replica.slices_of(group))
        for replica in plan.replicas
        for group in replica.forward
    ]
    # Of 462. Whole pieces: 4+3+3 | 4+2+2+2 = 234 | 228. Greed cuts a piece of two: 4+3+2+1 twice.
    assert max(loads) == heaviest


def test_missing_solver_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require("cbc")
    with pytest.raises(ModuleNotFoundError, match=r"needs highspy.*pip install '\.\[highs\]'"):
        Planner([5], DataSettings(10, 2, packing="fixed_ilp", solver="highs"), work)
