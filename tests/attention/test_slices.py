"""Index arithmetic of slices: every key of every segment is the token that it should be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.attention.sharding import SHARDINGS, layout, regrouped
from lightning_wlb.attention.slices import OWN, SlicedReplica
from lightning_wlb.planning.units import backward_layout, forward_layout, forward_parts, last_uses
from tests.strategy.random_plans import random_replica

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=4)


def tokens_on(arrangement, slices, rank):
    """(document, token) of each real row of a rank."""
    return [
        (slices[chunk.document].document, slices[chunk.document].start + token)
        for chunk in arrangement.chunks[rank]
        for token in range(chunk.start, chunk.stop)
    ]


def check_keys(indices, arrangement, slices, held, window):
    """Each segment of each rank reads its piece from the first key in sight to its last query."""
    ranks = range(arrangement.ranks)
    own = [tokens_on(arrangement, slices, rank) for rank in ranks]
    padded = [[*rows, *[None] * (arrangement.rows - len(rows))] for rows in own]

    def tokens_of(run, rank):
        rows = padded if run.micro_batch == OWN else held[run.micro_batch]
        return rows[rank][run.start : run.stop]

    put_together = [
        [token for run in of_rank.runs for token in tokens_of(run, rank)]
        for rank, of_rank in zip(ranks, indices, strict=True)
    ]
    stride = indices[0].rows
    everything = [
        token for mine in put_together for token in [*mine, *[None] * (stride - len(mine))]
    ]
    for rank, of_rank in zip(ranks, indices, strict=True):
        assert all(run.start < run.stop for run in of_rank.runs)
        # What whole pieces would send is not sent besides.
        assert (of_rank.own.gathered, of_rank.own.send_counts, len(of_rank.own.send_index)) == (
            0, (), 0,
        )  # fmt: skip
        if len(ranks) == 1:  # in the order of the segments already, in the fewest runs
            keys = everything
            assert not any(
                one.micro_batch == other.micro_batch and one.stop == other.start
                for one, other in pairwise(of_rank.runs)
            )
        else:
            assert of_rank.rows == stride
            keys = [everything[row] for row in of_rank.own.key_index]
        queries = own[rank]
        assert [token for _, token in queries] == of_rank.positions.tolist()
        bounds = of_rank.own.cu_seqlens_q
        for segment, first in enumerate(bounds[:-1]):
            document, last = queries[bounds[segment + 1] - 1]
            assert queries[first][0] == document
            part = keys[of_rank.own.cu_seqlens_k[segment] : of_rank.own.cu_seqlens_k[segment + 1]]
            seen_from = 0 if window is None else max(queries[first][1] - window + 1, 0)
            assert part == [(document, token) for token in range(seen_from, last + 1)]


@given(
    LENGTHS,
    st.randoms(use_true_random=False),
    st.sampled_from(sorted(SHARDINGS)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.none() | st.integers(1, 20),
)
@settings(max_examples=50)
def test_keys_of_both_passes_where_backward_runs_forward_again(
    lengths, draw, name, ranks, tensor, window
):
    replica = random_replica(draw, lengths, "recomputed", name)
    layouts = [forward_layout(replica, each, ranks, tensor) for each in replica.forward]
    members = [replica.slices_of(each) for each in replica.forward]
    held = [
        [tokens_on(each, slices, rank) for rank in range(ranks)]
        for each, slices in zip(layouts, members, strict=True)
    ]
    sliced = SlicedReplica(layouts, members, window)
    for number, each in enumerate(layouts):
        indices = [sliced.indices(number, rank) for rank in range(ranks)]
        check_keys(indices, each, members[number], held, window)
        # Only what has run before can be read.
        assert all(run.micro_batch < number for one in indices for run in one.runs)
    for each, parts in zip(replica.backward, forward_parts(replica), strict=True):
        arrangement = backward_layout(layouts, parts, tensor)
        slices = replica.slices_of(each)
        assert arrangement.rows % tensor == 0
        check_keys(
            [sliced.indices_again(arrangement, parts, rank) for rank in range(ranks)],
            arrangement,
            slices,
            held,
            window,
        )
        for rank in range(ranks):
            rows = tokens_on(arrangement, slices, rank)
            homes = sliced.homes(arrangement, parts, rank)
            # Every row has one home, on the same rank, and it is the same token.
            assert sorted(row for home in homes for row in home.here) == list(range(len(rows)))
            for home in homes:
                there = [held[home.micro_batch][rank][row] for row in home.there]
                assert there == [rows[row] for row in home.here]


def test_pieces_of_other_layouts_stay_on_their_ranks():
    first, second = layout("per_document", [8, 4], 2, 1), layout("hybrid", [3, 6], 2, 1)
    again = regrouped([(second, 0), (first, 0)], 4)
    assert again.lengths == (3, 8)
    assert again.rows == 8
    for rank in range(2):
        wanted = {(0, c.start, c.stop) for c in second.chunks[rank] if c.document == 0}
        wanted |= {(1, c.start, c.stop) for c in first.chunks[rank] if c.document == 0}
        assert set(again.chunks[rank]) == wanted
    # What lies on several ranks comes first, as collectives expect.
    assert again.shared == sum(c.stop - c.start for c in first.chunks[0] if c.document == 0)
    assert np.diff(again.first).sum() == len(again.table)


@pytest.mark.parametrize("kind", ["symmetric", "recomputed"])
@given(lengths=LENGTHS, draw=st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_every_forward_has_one_last_use(kind, lengths, draw):
    replica = random_replica(draw, lengths, kind)
    free = last_uses(replica)
    assert sorted(number for each in free for number in each) == list(range(len(replica.forward)))
    for at, parts in enumerate(forward_parts(replica)):
        for micro_batch, _ in parts:
            assert any(micro_batch in later for later in free[at:])
