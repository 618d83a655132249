"""Partitions: every way that others balance is at most as good, and cuts in order are exact."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.planning.partition import difference, in_order, partition

WORKS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def largest(works: np.ndarray, home: np.ndarray, receivers: int) -> int:
    return int(np.bincount(home, weights=works, minlength=receivers).max())


def differenced_plainly(works: list[int], receivers: int) -> int:
    """Karmarkar and Karp as it is told: whole states, the two of largest spread merged."""
    states = [[work] + [0] * (receivers - 1) for work in works]
    while len(states) > 1:
        states.sort(key=lambda state: state[-1] - state[0])
        first, second = states.pop(0), states.pop(0)
        merged = sorted((a + b for a, b in zip(first, second[::-1], strict=True)), reverse=True)
        states.append(merged)
    return max(states[0])


@settings(max_examples=150, deadline=None)
@given(works=WORKS, receivers=st.integers(2, 6), seed=st.integers(0, 3))
def test_no_known_way_is_better(works: list[int], receivers: int, seed: int) -> None:
    array = np.array(works)
    home = partition(array, receivers)
    ours = largest(array, home, receivers)
    descending = sorted(works, reverse=True)
    differenced = difference(descending, receivers)
    loads = [0] * receivers
    for work in descending:
        loads[loads.index(min(loads))] += work
    blocks = np.arange(len(works)) * receivers // len(works)
    assert ours <= max(loads)
    assert ours <= largest(np.array(descending), np.array(differenced), receivers)
    assert ours <= largest(array, blocks, receivers)
    if len(works) >= receivers:
        assert set(home.tolist()) == set(range(receivers))
    assert np.array_equal(home, partition(array, receivers))


@settings(max_examples=150, deadline=None)
@given(works=st.lists(st.integers(1, 10**6), min_size=2, max_size=25), receivers=st.integers(2, 5))
def test_differencing_is_that_of_karmarkar_and_karp(works: list[int], receivers: int) -> None:
    works = sorted(set(works), reverse=True)  # equal works may be merged in another order
    home = difference(works, receivers)
    ours = largest(np.array(works), np.array(home), receivers)
    plainly = differenced_plainly(works, receivers)
    # Spreads may be equal too, where either order is the method.
    assert abs(ours - plainly) <= max(works) // 2
    assert ours >= -(-sum(works) // receivers)


def test_differencing_of_the_textbook() -> None:
    assert sorted(np.bincount(difference([8, 7, 6, 5, 4], 2), weights=[8, 7, 6, 5, 4])) == [14, 16]
    assert differenced_plainly([8, 7, 6, 5, 4], 2) == 16


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 8), receivers=st.integers(2, 5), data=st.data())
def test_equal_sizes(rows: int, receivers: int, data: st.DataObject) -> None:
    count = rows * receivers
    works = data.draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
    home = partition(np.array(works), receivers, sized=True)
    assert np.bincount(home, minlength=receivers).tolist() == [rows] * receivers
    blocks = np.arange(count) // rows
    assert largest(np.array(works), home, receivers) <= largest(np.array(works), blocks, receivers)


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=9),
    parts=st.integers(1, 4),
    cap=st.integers(20, 60),
)
def test_runs_are_the_best_of_all(items: list[tuple[int, int]], parts: int, cap: int) -> None:
    works, tokens = [work for work, _ in items], [each for _, each in items]
    bounds = in_order(works, parts, tokens, cap)
    best = None
    empty = max(parts - len(items), 0)
    for cuts in combinations(range(1, len(items)), parts - 1 - empty):
        ends = [0, *cuts, len(items)]
        runs = list(pairwise(ends))
        if all(sum(tokens[a:b]) <= cap for a, b in runs):
            most = max(sum(works[a:b]) for a, b in runs)
            best = most if best is None else min(best, most)
    if best is None:
        assert bounds is None
    else:
        assert bounds is not None
        found = list(pairwise(bounds))
        assert max(sum(works[a:b]) for a, b in found) == best
        assert all(sum(tokens[a:b]) <= cap for a, b in found)


def test_small_partitions_are_near_the_best_of_all() -> None:
    """Exchanges find what greedy ways miss, such as 3 + 3 and 2 + 2 + 2."""
    for works in ([3, 3, 2, 2, 2], [5, 5, 4, 3, 3], [7, 6, 5, 4, 3, 2]):
        array = np.array(works)
        every = (np.array(home) for home in product(range(2), repeat=len(works)))
        best = min(largest(array, home, 2) for home in every)
        assert largest(array, partition(array, 2), 2) == best
