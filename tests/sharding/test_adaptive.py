"""Shardings that balance tiles, against the targets, and the choice among all of them."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.context_parallel import sequences
from benchmarks.sharding_latency import predicted_latency
from lightning_wlb.cost.attention_tiles import Integers, reference_kernel_cost
from lightning_wlb.sharding import (
    SHARDINGS,
    Tokens,
    choose,
    choose_each,
    layout,
    traffic,
    uses_all_to_all,
)
from tests.sharding.support import chunks_by_rank
from tests.sharding.test_shardings import as_tuples


@cache
def windows(window: int) -> list[list[int]]:
    return sequences(window, 60, seed=1)


def ideal(lengths: list[int], ranks: int) -> float:
    sizes = np.array(lengths)
    return float(reference_kernel_cost(sizes, sizes).sum()) / ranks


def test_hybrid_cuts_one_long_piece_in_pairs() -> None:
    # 20 tiles on 2 ranks: 5 tiles from each end, and the middle.
    assert as_tuples(layout("hybrid", [2560], 2, 1)) == [
        [(0, 0, 640), (0, 1920, 2560)],
        [(0, 640, 1920)],
    ]


def test_hybrid_cuts_at_tiles_from_the_end_and_keeps_short_pieces_whole() -> None:
    lengths = [2600, 300, 300, 40, 40]
    made = layout("hybrid", lengths, 2, 1)
    assert made.rows == 1640
    for chunks in chunks_by_rank(made):
        for document, start, stop in chunks:
            if document == 0:
                # 2600 = 20 tiles and a head of 40 tokens.
                assert start == 0 or (2600 - start) % 128 == 0
                assert (2600 - stop) % 128 == 0
    whole = {each.document for chunks in chunks_by_rank(made) for each in chunks if each.start == 0}
    assert whole >= {1, 2, 3, 4}
    assert traffic(made).sum() > 0
    # Only rows of the piece that lies on both ranks are among those that could travel.
    for chunks in chunks_by_rank(made):
        rows = 0
        for document, start, stop in chunks:
            if document == 0:
                assert rows < made.shared
            rows += stop - start


def test_whole_pieces_on_every_rank_send_nothing() -> None:
    made = layout("hybrid", [256] * 8, 4, 1)
    assert made.shared == 0
    assert traffic(made).sum() == 0
    assert predicted_latency(made) == ideal([256] * 8, 4)


def test_ptrr_deals_tiles_there_and_back() -> None:
    # Descending work is tile 3, 2, 1, 0: rank 0, 1, 1, 0.
    assert as_tuples(layout("ptrr", [512], 2, 1)) == [
        [(0, 0, 128), (0, 384, 512)],
        [(0, 128, 384)],
    ]


@pytest.mark.parametrize(
    ("window", "ranks", "most"),
    [
        (131_072, 4, 1.01),
        (131_072, 8, 1.02),
        (131_072, 16, 1.06),
        (65_536, 4, 1.02),
        (65_536, 8, 1.04),
        (65_536, 16, 1.12),
    ],
)
def test_the_modelled_latency_of_the_slowest_rank(window: int, ranks: int, most: float) -> None:
    """Mean over sequences of max over ranks / ideal; rows are equal before padding."""
    ratios = []
    for lengths in windows(window):
        _, made = choose(lengths, ranks, 1)
        assert made.rows * ranks <= 1.002 * window
        ratios.append(predicted_latency(made) / ideal(lengths, ranks))
    assert np.mean(ratios) <= most


@pytest.mark.parametrize("ranks", [4, 16])
def test_no_rank_sends_more_than_by_an_all_gather_of_everything(ranks: int) -> None:
    whole = sent = 0
    for lengths in windows(131_072)[:20]:
        _, made = choose(lengths, ranks, 1)
        moved = traffic(made)
        by_all_to_all = uses_all_to_all(made, moved)
        sent += int(moved.sum(axis=1).max()) if by_all_to_all else (ranks - 1) * made.shared
        whole += (ranks - 1) * made.rows
    assert sent < 0.75 * whole


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    ranks=st.sampled_from([2, 3, 8]),
    overhead=st.integers(1, 3),
)
@settings(max_examples=40)
def test_the_least_predicted_latency_wins(lengths: list[int], ranks: int, overhead: int) -> None:
    def cost(queries: Integers, keys: Integers) -> Integers:
        return reference_kernel_cost(queries, keys, overhead)

    names = tuple(SHARDINGS)
    name, made = choose(lengths, ranks, 2, cost, names)
    costs = {each: predicted_latency(layout(each, lengths, ranks, 2), cost) for each in names}
    assert predicted_latency(made, cost) == costs[name]
    sizes = np.array(lengths)
    if 100 * ranks * costs[name] > 102 * cost(sizes, sizes).sum():
        assert costs[name] == min(costs.values())
        assert name == next(each for each in names if costs[each] == costs[name])
    assert as_tuples(made) == as_tuples(layout(name, lengths, ranks, 2))


def test_the_slowest_rank_counts() -> None:
    made = layout("per_sequence", [256, 256], 2, 1)
    # Chunks of 128 tokens: rank 0 has the first of piece 0 and the last of piece 1, rank 1 the
    # others; a segment of one tile costs 2 + 1.25 per key tile, in quarters.
    assert predicted_latency(made) == 4 * (2 + 1.25) + 4 * (2 + 2.5)
    assert predicted_latency(layout("hybrid", [], 4, 1)) == 0


def test_the_choice_sees_the_context_of_slices() -> None:
    """A short slice of a long document is short only by its own tokens."""
    lengths, contexts = [512] * 9, [60_000, *[0] * 8]
    assert choose(lengths, 4, 1)[0] == "hybrid"
    name, made = choose(lengths, 4, 1, contexts=contexts)
    assert name != "hybrid"
    # The slice is on all ranks then.
    before = predicted_latency(layout("hybrid", lengths, 4, 1), contexts=contexts)
    assert predicted_latency(made, contexts=contexts) < 0.6 * before


@given(
    micro_batches=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9000)), max_size=6),
            st.sampled_from([1, 2, 3, 8]),
        ),
        max_size=6,
    ),
    tensor=st.sampled_from([1, 4]),
)
@settings(max_examples=40)
def test_micro_batches_chosen_together_are_those_chosen_alone(micro_batches, tensor) -> None:
    every = []
    for pieces, ranks in micro_batches:
        lengths, contexts = ([each[at] for each in pieces] for at in (0, 1))
        every.append(Tokens(lengths, contexts, ranks))
    alone = [choose(*each[::2], tensor, contexts=each.contexts) for each in every]
    assert choose_each(every, tensor) == [(name, made.rows) for name, made in alone]
