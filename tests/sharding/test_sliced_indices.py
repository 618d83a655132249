"""Index arithmetic of slices: every key of every segment is the token that it should be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.prediction.micro_batch import layout_of
from lightning_wlb.sharding import SHARDINGS
from lightning_wlb.sharding.sliced_indices import OWN, SlicedReplica
from tests.sharding.support import chunks_by_rank
from tests.strategy.random_plans import random_replica

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=4)


def tokens_on(arrangement, slices, rank):
    """(document, token) of each real row of a rank."""
    return [
        (slices[chunk.document].document, slices[chunk.document].start + token)
        for chunk in chunks_by_rank(arrangement)[rank]
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
def test_every_segment_reads_the_keys_of_its_piece(lengths, draw, name, ranks, tensor, window):
    replica = random_replica(draw, lengths, name)
    layouts = [layout_of(replica, each, ranks, tensor) for each in replica.forward]
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
