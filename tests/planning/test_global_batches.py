"""Global batches: each draw continues where a saved state stands, until the epoch is exhausted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import generator_a, stdlib_lengths
from lightning_wlb.planning.global_batches import (
    GlobalBatches,
    Stream,
    StreamPosition,
    document_numbers,
    next_pieces,
)


def batches(lengths, cuts=False) -> GlobalBatches:
    return GlobalBatches(np.array(lengths), Stream(20, 10, cuts, 0, False))


def test_stream_is_cut_at_windows_and_the_remainder_opens_the_next() -> None:
    given = np.array([2, 0, 1]), np.array([5, 4, 23])
    first, at = next_pieces(*given, StreamPosition(), 20, 10, cuts_stream=True)
    assert first == [(2, 0, 10), (2, 10, 20)]
    assert at == (0, 20)
    second, at = next_pieces(*given, at, 20, 10, cuts_stream=True)
    assert second == [(2, 20, 23), (0, 0, 5), (1, 0, 2), (1, 2, 4)]
    assert at == (3, 0)
    assert next_pieces(*given, at, 20, 10, cuts_stream=True) == ([], at)


def test_a_global_batch_ends_where_it_is_nearest_to_its_tokens() -> None:
    # N·C = 20: 17 is nearer than 17 + 10, 16 + 8 as near as 16, and a long document goes on first.
    arrivals = batches([9, 8, 10, 6, 8, 45, 1])
    drawn = []
    while (batch := arrivals.draw(0)) is not None:
        drawn.append([(piece.document, piece.origin, piece.stop) for piece in batch])
    assert drawn == [
        [(0, 0, 9), (1, 0, 8)],
        [(2, 0, 10), (3, 0, 6), (4, 0, 8)],
        [(5, 0, 10), (5, 10, 20)],
        [(5, 20, 30), (5, 30, 40)],
        [(5, 40, 45), (6, 0, 1)],
    ]


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    count=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_every_global_batch_but_the_last_has_its_tokens_within_half_a_window(
    lengths, count, shuffle
) -> None:
    arrivals = GlobalBatches(np.array(lengths), Stream(10 * count, 10, False, 3, shuffle))
    while not arrivals.exhausted:
        tokens = sum(piece.tokens for piece in arrivals.draw(0))
        if not arrivals.exhausted:
            assert abs(tokens - 10 * count) <= 5
        else:
            assert 0 < tokens <= 10 * count + 5


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), cuts=st.booleans())
def test_a_state_is_a_place_in_the_epoch(lengths, cuts) -> None:
    whole = batches(lengths, cuts)
    tokens = 0
    while not whole.exhausted:
        resumed = batches(lengths, cuts)
        resumed.load_state_dict(whole.state_dict())
        drawn = whole.draw(0)
        assert resumed.draw(0) == drawn
        assert resumed.state_dict() == whole.state_dict()
        assert all(piece.tokens <= 10 for piece in drawn)
        tokens += sum(piece.tokens for piece in drawn)
    assert whole.draw(0) is None
    assert tokens == sum(lengths)


@pytest.mark.parametrize("documents", [1, 2, 300, 70_000])
def test_the_order_is_numpys_whatever_the_size_of_a_number(documents) -> None:
    order = np.arange(documents)
    np.random.default_rng((7, 0)).shuffle(order)
    stream = Stream(documents, 1, False, 7, True)
    drawn = GlobalBatches(np.ones(documents, np.int64), stream).draw(0)
    assert [piece.document for piece in drawn] == order.tolist()
    assert document_numbers(documents).dtype == np.int32


CHATS = np.random.default_rng(0).lognormal(6, 1, 40_000).astype(np.int64) + 2


@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize(
    ("lengths", "window"),
    [(generator_a(12_000, 131_072, 0), 131_072), (stdlib_lengths(), 65_536), (CHATS, 4096)],
    ids=["generator-a", "stdlib", "chats"],
)
def test_tokens_a_step_spread_by_eight_percent_at_most(lengths, window, count) -> None:
    arrivals = GlobalBatches(lengths, Stream(window * count, window, False, 0, True))
    tokens = []
    while (batch := arrivals.draw(0)) is not None:
        tokens.append(sum(piece.tokens for piece in batch))
    assert sum(tokens) == lengths.sum()
    whole = np.array(tokens[:-1])  # an epoch's last has what is left
    assert len(whole) >= 10
    assert whole.std() / whole.mean() <= 0.32 / count
