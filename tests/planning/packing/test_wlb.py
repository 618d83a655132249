"""Algorithm 1: what waits in the queues, where thresholds lie, and the greedy of its listing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import Piece
from lightning_wlb.planning.dealing import deal_capped
from lightning_wlb.planning.packing.base import oldest_first
from lightning_wlb.planning.packing.wlb import release, thresholds_from_lengths
from tests.planning.packing.test_baselines import tokens_of
from tests.planning.test_slicing import pieces_of


def weight(tokens: int) -> int:
    return tokens * (tokens + 20)


def test_hand_worked_case() -> None:
    # Work of 50, 30, 20, 10: 3500, 1500, 800, 300. After 50 | 30 30 20: 3500 | 3800. The first 10
    # goes to 3500, the second to the lower number of 3800 | 3800, the third to 3800 beside 4100.
    micro_batches, carried = deal_capped(pieces_of([10, 50, 30, 10, 20, 30, 10]), 2, 100, weight)
    assert tokens_of(micro_batches) == [[50, 10, 10], [30, 30, 20, 10]]
    assert carried == []


def test_full_bin_of_least_work_gives_way_to_the_shortest() -> None:
    # Work of 40 is 2400, of three 14s 1428 in 42 tokens: a 6 goes there first, then beside the 40.
    micro_batches, carried = deal_capped(pieces_of([40, 14, 14, 14, 6, 6]), 2, 45, weight)
    assert tokens_of(micro_batches) == [[40], [14, 14, 14]]
    assert [piece.document for piece in carried] == [4, 5]
    micro_batches, carried = deal_capped(pieces_of([40, 14, 14, 14, 6, 6]), 2, 46, weight)
    assert tokens_of(micro_batches) == [[40, 6], [14, 14, 14]]
    assert [piece.document for piece in carried] == [5]


def listing(lengths, bins: int, cap: int) -> tuple[list[list[int]], list[int]]:
    """Lines 16-28 as printed, with ``<=``; numbers of the pieces."""
    micro_batches: list[list[int]] = [[] for _ in range(bins)]
    carried = []

    def size(micro_batch: list[int]) -> int:
        return sum(lengths[number] for number in micro_batch)

    def load(micro_batch: list[int]) -> int:
        return sum(weight(lengths[number]) for number in micro_batch)

    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        least_work = min(micro_batches, key=load)
        least_tokens = min(micro_batches, key=size)
        if size(least_work) + lengths[number] <= cap:
            least_work.append(number)
        elif size(least_tokens) + lengths[number] <= cap:
            least_tokens.append(number)
        else:
            carried.append(number)
    return micro_batches, carried


@given(
    lengths=st.lists(st.integers(1, 30), max_size=30),
    bins=st.integers(1, 5),
    cap=st.integers(30, 60),
    order=st.randoms(use_true_random=False),
)
def test_equals_the_listing_in_any_order_of_arrival(lengths, bins, cap, order) -> None:
    pieces = pieces_of(lengths)
    order.shuffle(pieces)
    micro_batches, carried = deal_capped(pieces, bins, cap, weight)
    expected, expected_carried = listing(lengths, bins, cap)
    assert [[piece.document for piece in micro_batch] for micro_batch in micro_batches] == expected
    assert [piece.document for piece in carried] == expected_carried


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


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40),
    window=st.integers(1, 100),
    queues=st.integers(0, 5),
)
def test_thresholds_are_always_legal(lengths, window, queues) -> None:
    thresholds = thresholds_from_lengths(np.array(lengths), window, queues, quadratic)
    assert all(low < high for low, high in pairwise((0, *thresholds, window + 1)))
    assert len(thresholds) <= queues
    assert bool(thresholds) == bool(queues)
