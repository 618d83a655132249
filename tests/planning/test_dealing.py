"""Dealing of micro-batches to replicas, and of pieces to pipelines, alike or not."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.planning import dealing
from lightning_wlb.planning.dealing import Costs, deal_greedily, heaviest_first, round_robin


def test_round_robin_keeps_the_order() -> None:
    assert round_robin([5, 9, 1, 1, 7], 2) == [[0, 2, 4], [1, 3]]
    assert round_robin([5, 9], 3) == [[0], [1], []]


def test_heaviest_first_counts_may_differ_and_ties_go_by_number() -> None:
    assert heaviest_first([3, 3, 3, 9], 2) == [[3], [0, 1, 2]]
    assert heaviest_first([1, 1, 1], 2) == [[0, 2], [1]]
    assert heaviest_first([2], 3) == [[0], [], []]
    assert heaviest_first([], 2) == [[], []]


@pytest.mark.parametrize("deal", [round_robin, heaviest_first])
@given(loads=st.lists(st.integers(0, 9), max_size=12), replicas=st.integers(1, 5))
def test_every_micro_batch_is_dealt_once(deal, loads, replicas) -> None:
    dealt = deal(loads, replicas)
    assert len(dealt) == replicas
    assert sorted(index for indices in dealt for index in indices) == list(range(len(loads)))
    assert all(indices == sorted(indices) for indices in dealt)


@given(loads=st.lists(st.integers(1, 100), min_size=1, max_size=20), replicas=st.integers(1, 4))
def test_heaviest_first_is_within_one_micro_batch_of_even(loads, replicas) -> None:
    totals = [sum(loads[index] for index in indices) for indices in heaviest_first(loads, replicas)]
    assert max(totals) - min(totals) <= max(loads)


def lower_bound(costs: Costs, own, pipeline: int, stages: int) -> int:
    """Hydraulis' Equation 2: no packing of a pipeline's own pieces takes less."""
    mine = [costs[index][pipeline] or 0 for index in own]
    return sum(mine) + (stages - 1) * max(mine, default=0)


def worst(costs: Costs, dealt, stages) -> int:
    return max(
        lower_bound(costs, own, pipeline, stages[pipeline]) for pipeline, own in enumerate(dealt)
    )


def best_of_all(costs: Costs, stages) -> int:
    """Equation 3, over all dealings."""
    return min(
        worst(costs, [[i for i, home in enumerate(homes) if home == r] for r in allowed], stages)
        for allowed in [range(len(stages))]
        for homes in product(allowed, repeat=len(costs))
        if all(costs[i][home] is not None for i, home in enumerate(homes))
    )


def test_bound_and_repetition() -> None:
    costs = [[cost, 2 * cost, None] for cost in (9, 5, 4, 3, 2, 2)]
    assert lower_bound(costs, [0, 5], 0, 4) == 11 + 3 * 9
    assert lower_bound(costs, [0, 5], 1, 1) == 22
    assert lower_bound(costs, [], 2, 4) == 0
    one, same = (deal_greedily(costs, [4, 1, 1]) for _ in range(2))
    assert one == same
    # Costs beyond 64 bits are dealt alike.
    large = [[cost and cost << 70 for cost in each] for each in costs]
    assert one == deal_greedily(large, [4, 1, 1])


@pytest.mark.parametrize(
    ("costs", "stages"),
    [
        ([[cost] * 3 for cost in (9, 7, 5, 4, 3, 2, 2)], [4, 4, 4]),
        # A deep pipeline that holds all, a fast one and a slow one that hold short pieces only.
        (
            [[9, None, None], [7, None, None], *([2 * c, c, 3 * c] for c in (5, 4, 3, 2, 2))],
            [3, 1, 1],
        ),
    ],
)
def test_greedy_is_near_the_best_of_all_dealings(costs, stages, monkeypatch) -> None:
    best = best_of_all(costs, stages)
    greedy = deal_greedily(costs, stages)
    assert best <= worst(costs, greedy, stages) <= 1.05 * best
    # More orders are never worse, and the first is no good one.
    found = []
    for trials in (1, 2, 5, 20, dealing.TRIALS):
        monkeypatch.setattr(dealing, "TRIALS", trials)
        found.append(worst(costs, deal_greedily(costs, stages), stages))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_piece_is_dealt_once_to_a_pipeline_that_runs_it(data: st.DataObject) -> None:
    stages = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cost = st.none() | st.integers(0, 50)
    row = st.tuples(*[cost] * len(stages)).filter(lambda each: each.count(None) < len(each))
    costs = data.draw(st.lists(row, max_size=8))
    dealt = deal_greedily(costs, stages)
    assert sorted(index for own in dealt for index in own) == list(range(len(costs)))
    for pipeline, own in enumerate(dealt):
        assert own == sorted(own)
        assert all(costs[index][pipeline] is not None for index in own)


def test_a_piece_that_no_pipeline_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="piece 1 can run on none of 2 pipelines"):
        deal_greedily([[1, None], [None, None]], [1, 1])
