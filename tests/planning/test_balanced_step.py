"""Partitions: no worse than simple ways, and near the best of small ones."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.planning.balanced_step import partition

WORKS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def largest(works: np.ndarray, home: np.ndarray, receivers: int) -> int:
    return int(np.bincount(home, weights=works, minlength=receivers).max())


@settings(max_examples=150, deadline=None)
@given(works=WORKS, receivers=st.integers(2, 6), seed=st.integers(0, 3))
def test_no_known_way_is_better(works: list[int], receivers: int, seed: int) -> None:
    array = np.array(works)
    home = partition(array, receivers)
    ours = largest(array, home, receivers)
    descending = sorted(works, reverse=True)
    loads = [0] * receivers
    for work in descending:
        loads[loads.index(min(loads))] += work
    blocks = np.arange(len(works)) * receivers // len(works)
    assert ours <= max(loads)
    assert ours <= largest(array, blocks, receivers)
    if len(works) >= receivers:
        assert set(home.tolist()) == set(range(receivers))
    assert np.array_equal(home, partition(array, receivers))


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 8), receivers=st.integers(2, 5), data=st.data())
def test_equal_sizes(rows: int, receivers: int, data: st.DataObject) -> None:
    count = rows * receivers
    works = data.draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
    home = partition(np.array(works), receivers, sized=True)
    assert np.bincount(home, minlength=receivers).tolist() == [rows] * receivers
    blocks = np.arange(count) // rows
    assert largest(np.array(works), home, receivers) <= largest(np.array(works), blocks, receivers)


def test_small_partitions_are_near_the_best_of_all() -> None:
    """Exchanges find what greedy ways miss, such as 3 + 3 and 2 + 2 + 2."""
    for works in ([3, 3, 2, 2, 2], [5, 5, 4, 3, 3], [7, 6, 5, 4, 3, 2]):
        array = np.array(works)
        every = (np.array(home) for home in product(range(2), repeat=len(works)))
        best = min(largest(array, home, 2) for home in every)
        assert largest(array, partition(array, 2), 2) == best
