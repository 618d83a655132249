"""Dealing micro-batches to replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.dealing import heaviest_first, round_robin


def test_round_robin_keeps_the_order() -> None:
    assert round_robin([5, 9, 1, 1, 7], 2) == [[0, 2, 4], [1, 3]]
    assert round_robin([5, 9], 3) == [[0], [1], []]


def test_heaviest_first_goes_to_the_least_loaded() -> None:
    # 9 -> replica 0; 6 -> 1; 5 -> 1 (6 < 9); 4 -> 0 (9 < 11); 2 -> 1 (11 < 13); 1 -> 0 (13 = 13)
    assert heaviest_first([4, 9, 1, 6, 5, 2], 2) == [[0, 1, 2], [3, 4, 5]]


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
