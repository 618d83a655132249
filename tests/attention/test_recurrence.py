"""Where the rows of pieces lie on the ranks that share them, in the order of a recurrence."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.attention.recurrence import (
    Segment,
    recurrent_rows,
    to_all_rows,
    to_own_rows,
)
from lightning_wlb.plan import Slice
from lightning_wlb.sharding import layout


def test_adjacent_slices_of_a_piece_are_one_segment():
    slices = (Slice(3, 10, 14, 18), Slice(5, 0, 0, 2), Slice(3, 10, 18, 21))
    rows = recurrent_rows(layout("per_document", (4, 2, 3), 1, 1), slices, {(3, 10): 30}, 1)
    assert rows.segments == (Segment((3, 10), 4, 11, True), Segment((5, 0), 0, 2, False))
    assert rows.counts == (9,)
    assert rows.order is not None
    assert rows.order.tolist() == [0, 1, 2, 3, 6, 7, 8, 4, 5]


def test_rows_in_order_are_not_moved():
    rows = recurrent_rows(
        layout("per_document", (4, 2), 1, 1), (Slice(0, 0, 0, 4), Slice(1, 0, 0, 2)), {}, 1
    )
    assert rows.order is None


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    ranks=st.integers(1, 4),
    sharding=st.sampled_from(["per_document", "per_sequence", "hybrid"]),
)
def test_every_token_is_found_on_the_rank_that_holds_it(lengths, ranks, sharding):
    placed = layout(sharding, lengths, ranks, 1)
    slices = [Slice(number, 0, 0, length) for number, length in enumerate(lengths)]
    rows = recurrent_rows(placed, slices, {}, 1)
    assert rows.tokens == sum(lengths)
    tokens = []  # piece and offset of each row, one rank after another
    for rank in range(ranks):
        piece, _, start, stop = placed.table[placed.chunks_of(rank)].T[[1, 0, 2, 3]]
        for each in zip(piece.tolist(), start.tolist(), stop.tolist(), strict=True):
            tokens += [(each[0], offset) for offset in range(*each[1:])]
        assert rows.counts[rank] == int((stop - start).sum())
    order = range(len(tokens)) if rows.order is None else rows.order.tolist()
    wanted = [(number, each) for number, length in enumerate(lengths) for each in range(length)]
    assert [tokens[place] for place in order] == wanted
    own = torch.tensor([[document * 100 + offset] for document, offset in tokens])
    there = to_all_rows([own[:, None]], replace(rows, counts=(len(tokens),)), None)[0]
    assert there.flatten().tolist() == [number * 100 + each for number, each in wanted]
    back = to_own_rows(there, len(tokens), rows, None)
    assert torch.equal(back[:, 0], own)
