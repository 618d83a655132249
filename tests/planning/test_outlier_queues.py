"""Outlier queues: what waits, what goes, in which order, and where the thresholds lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing.base import oldest_first
from lightning_wlb.planning.packing.wlb import (
    check_thresholds,
    release,
    thresholds_from_lengths,
)


def piece(document: int, tokens: int, arrival: int = 0) -> Piece:
    return Piece(document, 0, tokens, arrival)


def quadratic(tokens: int) -> int:
    return tokens * (tokens + 100)


def test_queue_holds_from_its_threshold_to_below_the_next() -> None:
    arrivals = [piece(number, tokens) for number, tokens in enumerate((9, 10, 19, 20, 31, 5))]
    released, queues = release(arrivals, [[], []], (10, 20), 4)
    assert [each.tokens for each in released] == [9, 5]
    assert [[each.tokens for each in queue] for queue in queues] == [[10, 19], [20, 31]]


def test_full_queue_releases_its_n_oldest_once() -> None:
    waiting = [piece(1, 50, 0), piece(2, 90, 1)]
    arrivals = [piece(number, 60, 2) for number in range(3, 8)]
    released, queues = release([*arrivals, piece(9, 3, 2)], [waiting], (40,), 3)
    assert [each.document for each in released] == [9, 1, 2, 3]  # 7 waited, 3 go, 4 stay
    assert [each.document for each in queues[0]] == [4, 5, 6, 7]
    assert len(waiting) == 2  # the caller's queue is not changed
    released, queues = release([], queues, (40,), 3)
    assert [each.document for each in released] == [4, 5, 6]
    assert release([], queues, (40,), 3) == ([], [[piece(7, 60, 2)]])


def test_without_queues_nothing_waits() -> None:
    arrivals = [piece(1, 100), piece(2, 1)]
    assert release(arrivals, [], (), 2) == (arrivals, [])


@given(
    lengths=st.lists(st.integers(1, 50), max_size=30),
    thresholds=st.lists(st.integers(1, 50), max_size=3, unique=True).map(sorted),
    count=st.integers(1, 4),
)
def test_release_loses_nothing(lengths, thresholds, count) -> None:
    arrivals = [piece(number, tokens) for number, tokens in enumerate(lengths)]
    released, queues = release(arrivals, [[] for _ in thresholds], thresholds, count)
    left = [each for queue in queues for each in queue]
    assert sorted(released + left) == arrivals
    bounds = [*thresholds, 51]
    for level, queue in enumerate(queues):
        assert all(bounds[level] <= each.tokens < bounds[level + 1] for each in queue)
        assert [each.document for each in queue] == sorted(each.document for each in queue)


def test_oldest_first_takes_a_prefix_within_the_tokens() -> None:
    held = [piece(4, 10, 2), piece(9, 30, 0), piece(1, 30, 2), piece(3, 20, 1), Piece(9, 30, 35, 0)]
    order = [
        piece(9, 30, 0),
        Piece(9, 30, 35, 0),
        piece(3, 20, 1),
        piece(1, 30, 2),
        piece(4, 10, 2),
    ]
    assert oldest_first(held, 95) == (order, [])
    assert oldest_first(held, 94) == (order[:4], order[4:])
    assert oldest_first(held, 55) == (order[:3], order[3:])
    # The third would pass 54, and a younger, shorter one does not overtake it.
    assert oldest_first(held, 54) == (order[:2], order[2:])
    assert oldest_first(held, 1) == (order[:1], order[1:])
    assert oldest_first([], 10) == ([], [])


# --- thresholds ---------------------------------------------------------------------------


def test_first_threshold_is_the_nth_part_of_the_fair_share() -> None:
    lengths = np.array([10] * 90 + [500] * 2 + [2300])  # 2300: two pieces of 1000 and one of 300
    tokens = 900 + 1000 + 2300
    total = 90 * quadratic(10) + 2 * quadratic(500) + 2 * quadratic(1000) + quadratic(300)
    fair_share = 1000 * total / tokens
    for queues in (1, 2, 3):
        thresholds = thresholds_from_lengths(lengths, 1000, queues, quadratic)
        assert len(thresholds) == queues
        first = thresholds[0]
        assert quadratic(first - 1) < fair_share / queues <= quadratic(first)
        spaced = [first + (1000 - first) * index / queues for index in range(queues)]
        assert thresholds == pytest.approx(spaced, abs=1)


def test_equal_documents_never_wait_with_one_queue() -> None:
    (threshold,) = thresholds_from_lengths(np.full(10, 100), 1000, 1, quadratic)
    assert threshold > 100


def test_no_queues_no_thresholds() -> None:
    assert thresholds_from_lengths(np.array([5, 9]), 10, 0, quadratic) == ()


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40),
    window=st.integers(1, 100),
    queues=st.integers(0, 5),
)
def test_thresholds_are_always_legal(lengths, window, queues) -> None:
    thresholds = thresholds_from_lengths(np.array(lengths), window, queues, quadratic)
    check_thresholds(thresholds, window)
    assert len(thresholds) <= queues
    assert bool(thresholds) == bool(queues)


@pytest.mark.parametrize("thresholds", [(20, 10), (10, 10), (0, 10), (10, 101)])
def test_bad_thresholds_are_named(thresholds) -> None:
    with pytest.raises(ValueError, match=r"thresholds=\(\d+, \d+\).* window of 100 tokens"):
        check_thresholds(thresholds, 100)
