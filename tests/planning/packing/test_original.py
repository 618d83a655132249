"""Concatenate and cut every C tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import Piece
from lightning_wlb.planning.global_batches import cut_stream
from lightning_wlb.planning.packing.baselines import pack_windows


def test_stream_is_cut_at_windows_and_the_remainder_opens_the_next() -> None:
    order, lengths = np.array([2, 0, 1]), np.array([5, 4, 23])
    first, position, offset = cut_stream(order, lengths, 0, 0, 20, 10)
    assert first == [(2, 0, 10), (2, 10, 20)]
    assert (position, offset) == (0, 20)
    second, position, offset = cut_stream(order, lengths, position, offset, 20, 10)
    assert second == [(2, 20, 23), (0, 0, 5), (1, 0, 2), (1, 2, 4)]
    assert (position, offset) == (3, 0)
    assert cut_stream(order, lengths, 3, 0, 20, 10) == ([], 3, 0)


def test_pieces_gather_in_their_windows() -> None:
    pieces = [Piece(0, 0, 4, 0), Piece(1, 0, 6, 0), Piece(1, 6, 16, 0), Piece(2, 0, 3, 0)]
    assert pack_windows(pieces, 4, 10) == [pieces[:2], pieces[2:3], pieces[3:], []]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    window=st.integers(1, 15),
    bins=st.integers(1, 4),
)
def test_steps_hold_exactly_n_windows_until_the_end(lengths, window, bins) -> None:
    order = np.arange(len(lengths))
    position = offset = 0
    left = sum(lengths)
    covered = [0] * len(lengths)
    while position < len(lengths):
        cut, position, offset = cut_stream(
            order, np.array(lengths), position, offset, bins * window, window
        )
        for document, start, stop in cut:
            assert covered[document] == start
            covered[document] = stop
        pieces = [Piece(*part, 0) for part in cut]
        micro_batches = pack_windows(pieces, bins, window)
        sizes = [sum(piece.tokens for piece in micro_batch) for micro_batch in micro_batches]
        taken = min(left, bins * window)
        full, rest = divmod(taken, window)
        assert sizes == ([window] * full + [rest] + [0] * bins)[:bins]
        left -= taken
    assert covered == lengths
