"""The packings that others are compared with: original and best_fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dealing import fill
from lightning_wlb.planning.global_batches import StreamPosition, next_pieces
from lightning_wlb.planning.packing.base import PackingOptions, Rules
from lightning_wlb.planning.packing.baselines import OriginalPacker
from tests.planning.test_slicing import pieces_of


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    window=st.integers(1, 15),
    bins=st.integers(1, 4),
)
def test_steps_hold_exactly_n_windows_until_the_end(lengths, window, bins) -> None:
    order = np.arange(len(lengths))
    at = StreamPosition()
    left = sum(lengths)
    covered = [0] * len(lengths)
    rules = Rules(np.array(lengths), window, bins, window, WORK, PackingOptions())
    packer = OriginalPacker(rules)
    while at.position < len(lengths):
        cut, at = next_pieces(order, np.array(lengths), at, bins * window, window, cuts_stream=True)
        for document, start, stop in cut:
            assert covered[document] == start
            covered[document] = stop
        pieces = [Piece(*part, 0) for part in cut]
        micro_batches, carried = packer.pack(pieces, bins)
        assert carried == []
        sizes = [sum(piece.tokens for piece in micro_batch) for micro_batch in micro_batches]
        taken = min(left, bins * window)
        full, rest = divmod(taken, window)
        assert sizes == ([window] * full + [rest] + [0] * bins)[:bins]
        left -= taken
    assert covered == lengths


def tokens_of(micro_batches) -> list[list[int]]:
    return [[piece.tokens for piece in micro_batch] for micro_batch in micro_batches]


# Forward and backward of d tokens: d·(d + 20).
WORK = Work(PassWork(6, 1), PassWork(13, 1))
work = WORK.total


def test_best_fit_by_hand() -> None:
    # 7; 6; 4 into 6's; 3 into 7's; 3 opens; 2 into 3's.
    assert tokens_of(fill(pieces_of([3, 7, 2, 6, 4, 3]), 10)) == [[7, 3], [6, 4], [3, 2]]


@given(lengths=st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_is_the_definition(lengths) -> None:
    micro_batches: list[list[int]] = []
    for tokens in sorted(lengths, reverse=True):
        fitting = [
            index for index in range(len(micro_batches)) if sum(micro_batches[index]) + tokens <= 20
        ]
        if fitting:
            micro_batches[
                max(fitting, key=lambda index: (sum(micro_batches[index]), -index))
            ].append(tokens)
        else:
            micro_batches.append([tokens])
    assert tokens_of(fill(pieces_of(lengths), 20)) == micro_batches
