"""Dealing micro-batches to replicas."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.dispatch import deal_by_time, longest_first, redeal, round_robin
from lightning_wlb.planning.hydraulis import deal_exactly, deal_greedily, lower_bound


def test_round_robin_keeps_the_order() -> None:
    assert round_robin([5, 9, 1, 1, 7], 2) == [[0, 2, 4], [1, 3]]
    assert round_robin([5, 9], 3) == [[0], [1], []]


def test_longest_first_goes_to_the_least_loaded() -> None:
    # 9 -> replica 0; 6 -> 1; 5 -> 1 (6 < 9); 4 -> 0 (9 < 11); 2 -> 1 (11 < 13); 1 -> 0 (13 = 13)
    assert longest_first([4, 9, 1, 6, 5, 2], 2) == [[0, 1, 2], [3, 4, 5]]


def test_longest_first_counts_may_differ_and_ties_go_by_number() -> None:
    assert longest_first([3, 3, 3, 9], 2) == [[3], [0, 1, 2]]
    assert longest_first([1, 1, 1], 2) == [[0, 2], [1]]
    assert longest_first([2], 3) == [[0], [], []]
    assert longest_first([], 2) == [[], []]


@pytest.mark.parametrize("deal", [round_robin, longest_first])
@given(loads=st.lists(st.integers(0, 9), max_size=12), replicas=st.integers(1, 5))
def test_every_micro_batch_is_dealt_once(deal, loads, replicas) -> None:
    dealt = deal(loads, replicas)
    assert len(dealt) == replicas
    assert sorted(index for indices in dealt for index in indices) == list(range(len(loads)))
    assert all(indices == sorted(indices) for indices in dealt)


@given(loads=st.lists(st.integers(1, 100), min_size=1, max_size=20), replicas=st.integers(1, 4))
def test_longest_first_is_within_one_micro_batch_of_even(loads, replicas) -> None:
    totals = [sum(loads[index] for index in indices) for indices in longest_first(loads, replicas)]
    assert max(totals) - min(totals) <= max(loads)


# --- pieces before micro-batches ------------------------------------------------------------

descending = st.lists(st.integers(1, 200), max_size=25).map(lambda x: sorted(x, reverse=True))


def test_time_counts_half_the_stall_of_the_costliest() -> None:
    # P = 3: time is total + longest. 9 -> 18 | 5 -> 18 | 10; 4 -> 18 | 14; 3 -> 18 | 17;
    # 2 -> 18 | 19; 2 -> 20 | 19: twice that in the heap.
    assert deal_by_time([9, 5, 4, 3, 2, 2], 2, 3) == [[0, 5], [1, 2, 3, 4]]
    # Without a pipeline by work alone.
    assert deal_by_time([9, 5, 4, 3, 2, 2], 2, 1) == [[0, 3], [1, 2, 4, 5]]


def test_redeal_levels_times_with_cheap_pieces() -> None:
    costs = [1000, 1000] + [10] * 40
    dealt = [[0, *range(2, 22)], [1, *range(22, 42)]]
    # The first replica waits 200, the second not at all: 20 pieces more on the second.
    again = redeal(costs, dealt, [1400, 1200])
    assert [len(own) for own in again] == [11, 31]
    assert again[0][0] == 0
    assert again[1][0] == 1


@given(costs=descending, replicas=st.integers(1, 5), stages=st.integers(1, 5), data=st.data())
def test_pieces_are_dealt_once(costs, replicas, stages, data) -> None:
    for dealt in (
        deal_by_time(costs, replicas, stages),
        deal_greedily(costs, replicas, stages, trials=3),
    ):
        assert len(dealt) == replicas
        assert sorted(index for own in dealt for index in own) == list(range(len(costs)))
        assert all(own == sorted(own) for own in dealt)
        times = [
            sum(costs[index] for index in own) + data.draw(st.integers(0, 100)) for own in dealt
        ]
        again = redeal(costs, dealt, times)
        assert sorted(index for own in again for index in own) == list(range(len(costs)))


def test_hydraulis_bound_and_seed() -> None:
    costs = [9, 5, 4, 3, 2, 2]
    assert lower_bound(costs, [0, 5], 4) == 11 + 3 * 9
    assert lower_bound(costs, [], 4) == 0
    one, same = (deal_greedily(costs, 3, 4, trials=5, seed=7) for _ in range(2))
    assert one == same


def test_hydraulis_exact_is_the_best_of_all_dealings() -> None:
    costs, replicas, stages = [9, 7, 5, 4, 3, 2, 2], 3, 4

    def worst(homes) -> int:
        dealt = [[i for i, home in enumerate(homes) if home == r] for r in range(replicas)]
        return max(lower_bound(costs, own, stages) for own in dealt)

    best = min(map(worst, product(range(replicas), repeat=len(costs))))
    dealt, proven = deal_exactly(costs, replicas, stages)
    assert proven
    assert max(lower_bound(costs, own, stages) for own in dealt) == best
    greedy = deal_greedily(costs, replicas, stages)
    assert best <= max(lower_bound(costs, own, stages) for own in greedy) <= 1.1 * best
