"""Index arithmetic of the shardings: exact small cases, properties, balance on Generator A."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.sharding import (
    SHARDINGS,
    Layout,
    RankIndices,
    layout,
    rank_indices,
    traffic,
)
from tests.sharding.support import Chunk, chunks_by_rank

PER_DOCUMENT = ["per_document", "per_document_contiguous"]

micro_batches = st.lists(st.integers(1, 150), max_size=12)
sizes = st.sampled_from([1, 2, 3, 4, 8])


def rows_of(chunks: tuple[Chunk, ...]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)


def pairs_of(chunks: tuple[Chunk, ...]) -> int:
    """Query-key pairs under the causal mask: token j of a piece sees j + 1 keys."""
    return sum(
        (chunk.stop * (chunk.stop + 1) - chunk.start * (chunk.start + 1)) // 2 for chunk in chunks
    )


def as_tuples(made: Layout) -> list[list[tuple[int, int, int]]]:
    return [[tuple(chunk) for chunk in chunks] for chunks in chunks_by_rank(made)]


def test_per_sequence_cuts_the_concatenation() -> None:
    # Chunks of 4 tokens over 16: [0, 4) [4, 8) [8, 12) [12, 16); the first piece ends at 6.
    made = layout("per_sequence", [6, 10], 2, 1)
    assert as_tuples(made) == [[(0, 0, 4), (1, 6, 10)], [(0, 4, 6), (1, 0, 6)]]
    assert made.rows == 8


def test_per_document_deals_remainders_round_the_ranks_across_pieces() -> None:
    # 10 = 4 chunks of 2 and tokens 8, 9; 7 = 4 chunks of 1 and tokens 4, 5, 6.
    made = layout("per_document", [10, 7], 2, 4)
    assert as_tuples(made) == [
        [(0, 0, 2), (0, 6, 9), (1, 0, 1), (1, 3, 5), (1, 6, 7)],
        [(0, 2, 6), (0, 9, 10), (1, 1, 3), (1, 5, 6)],
    ]
    assert made.rows == 12  # 9 and 8 real rows, padded to a multiple of 4


def test_per_document_contiguous_gives_a_remainder_to_the_emptiest_rank() -> None:
    made = layout("per_document_contiguous", [10, 7], 2, 1)
    assert as_tuples(made) == [
        [(0, 0, 2), (0, 6, 10), (1, 0, 1), (1, 3, 4)],
        [(0, 2, 6), (1, 1, 3), (1, 4, 7)],
    ]
    assert made.rows == 9


def test_rank_indices_by_hand() -> None:
    made = layout("per_document_contiguous", [5, 2], 2, 4)
    # Rank 0: token 0 and [3, 5) of piece 0. Rank 1: [1, 3) of piece 0, all of piece 1.
    assert as_tuples(made) == [[(0, 0, 1), (0, 3, 5)], [(0, 1, 3), (1, 0, 2)]]
    assert made.rows == 4
    indices = rank_indices(made, 1)
    assert indices.document.tolist() == [0, 0, 1, 1]
    assert indices.offset.tolist() == [1, 2, 0, 1]
    assert indices.cu_seqlens_q.tolist() == [0, 2, 4]
    assert indices.cu_seqlens_k.tolist() == [0, 3, 5]
    assert (indices.max_seqlen_q, indices.max_seqlen_k) == (2, 3)
    # Rank 0 needs both of rank 1's rows of piece 0, rank 1 token 0; piece 1 does not travel. An
    # all-gather would move 3 rows to each.
    assert traffic(made).tolist() == [[0, 1], [2, 0]]
    assert (made.shared, indices.gathered) == (3, 0)
    assert (indices.send_counts, indices.receive_counts) == ((2, 0), (1, 0))
    assert indices.send_index.tolist() == [0, 1]
    assert indices.key_index.tolist() == [0, 1, 2, 3, 4]  # the arrived row, then the local ones
    assert indices.cu_seqlens_q.dtype == indices.cu_seqlens_k.dtype == np.int32
    assert indices.key_index.dtype == indices.document.dtype == indices.offset.dtype == np.int64


def exchanged(every: list[RankIndices], rank: int, rows: int) -> np.ndarray:
    """(piece, token) of every row of a rank's buffer after the exchange; -1 where it is padding."""
    local = np.full((len(every), rows, 2), -1)
    for held, indices in zip(local, every, strict=True):
        held[: len(indices.offset)] = np.stack([indices.document, indices.offset], axis=1)
    arriving = [held[: every[rank].gathered] for held in local]
    if every[rank].send_counts:
        assert every[rank].receive_counts == tuple(each.send_counts[rank] for each in every)
        arriving = [
            held[np.split(each.send_index, np.cumsum(each.send_counts))[rank]]
            for held, each in zip(local, every, strict=True)
        ]
    return np.concatenate([*arriving, local[rank]])


@pytest.mark.parametrize("sharding", SHARDINGS)
@given(lengths=micro_batches, ranks=sizes, tensor=sizes, window=st.none() | st.integers(1, 40))
@settings(max_examples=60)
def test_every_token_once_and_every_key_where_it_is_said_to_be(
    sharding: str, lengths: list[int], ranks: int, tensor: int, window: int | None
) -> None:
    made = layout(sharding, lengths, ranks, tensor)
    most = max(rows_of(chunks) for chunks in chunks_by_rank(made))
    assert made.rows % tensor == 0
    assert most <= made.rows < most + tensor

    every = [rank_indices(made, rank, window) for rank in range(ranks)]
    held = [
        token
        for indices in every
        for token in zip(indices.document.tolist(), indices.offset.tolist(), strict=True)
    ]
    assert len(held) == len(set(held))
    assert set(held) == {(d, t) for d, length in enumerate(lengths) for t in range(length)}

    for rank, (chunks, indices) in enumerate(zip(chunks_by_rank(made), every, strict=True)):
        buffer = exchanged(every, rank, made.rows)
        read = set()
        queries, keys = np.diff(indices.cu_seqlens_q), np.diff(indices.cu_seqlens_k)
        assert len(queries) == len(keys) == len(chunks)
        assert np.all(queries >= 1)
        assert np.all(keys >= queries)
        assert indices.max_seqlen_q == max(queries, default=0)
        assert indices.max_seqlen_k == max(keys, default=0)
        assert indices.cu_seqlens_q[-1] == len(indices.offset)
        assert indices.cu_seqlens_k[-1] == len(indices.key_index)
        for segment, chunk in enumerate(chunks):
            rows = buffer[
                indices.key_index[indices.cu_seqlens_k[segment] : indices.cu_seqlens_k[segment + 1]]
            ]
            assert np.all(rows[:, 0] == chunk.document)
            seen_from = 0 if window is None else max(chunk.start - window + 1, 0)
            assert rows[:, 1].tolist() == list(range(seen_from, chunk.stop))
            read |= set(map(tuple, rows.tolist()))
            own = slice(indices.cu_seqlens_q[segment], indices.cu_seqlens_q[segment + 1])
            assert np.all(indices.document[own] == chunk.document)
            assert indices.offset[own].tolist() == list(range(chunk.start, chunk.stop))
        # By all-to-all travels what is read, and nothing else.
        own = set(zip(indices.document.tolist(), indices.offset.tolist(), strict=True))
        assert traffic(made, window)[:, rank].sum() == len(read - own)
        for before, after in pairwise(chunks):
            assert (before.document, before.stop) != (after.document, after.start)


@given(lengths=micro_batches, ranks=sizes)
@settings(max_examples=60)
def test_no_rank_has_more_rows_than_the_mean(lengths: list[int], ranks: int) -> None:
    for sharding in SHARDINGS:
        most = layout(sharding, lengths, ranks, 1).rows
        assert most <= -(-sum(lengths) // ranks) + (sharding == "per_sequence")


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_rank_may_have_nothing(sharding: str) -> None:
    made = layout(sharding, [1], 4, 2)
    assert made.rows == 2
    counts = [len(rank_indices(made, rank).offset) for rank in range(4)]
    assert sorted(counts) == [0, 0, 0, 1]
    idle = rank_indices(made, counts.index(0))
    assert idle.cu_seqlens_q.tolist() == idle.cu_seqlens_k.tolist() == [0]
    assert (idle.max_seqlen_q, idle.max_seqlen_k, len(idle.key_index)) == (0, 0, 0)
    assert layout(sharding, [], 4, 2).rows == 0


@cache
def generator_a(window: int) -> list[list[int]]:
    """Micro-batches of one window each, as ``original`` packing cuts them (docs/design.md)."""
    random = np.random.default_rng(0)
    count = 4000
    body = np.exp(random.normal(6.8, 1.2, count))
    tail = random.random(count) < 0.01
    long = 8192 * (1 - random.random(count)) ** (-1 / 0.3)
    lengths = np.clip(np.where(tail, long, body).astype(np.int64), 32, 131_072)
    ends = np.cumsum(lengths)
    cuts = np.arange(window, ends[-1], window)
    ends = np.union1d(ends, cuts)
    pieces = np.diff(ends, prepend=0)
    return [pieces[(ends > cut - window) & (ends <= cut)].tolist() for cut in cuts]


@pytest.mark.parametrize("window", [65_536, 131_072])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sharding", PER_DOCUMENT)
def test_balance_on_generator_a(sharding: str, ranks: int, window: int) -> None:
    """Promise 6: a sharding with right gradients and unequal work is a bug."""
    pairs = []
    for lengths in generator_a(window):
        assert sum(lengths) == window
        made = layout(sharding, lengths, ranks, 1)
        rows = [rows_of(chunks) for chunks in chunks_by_rank(made)]
        assert max(rows) * ranks <= 1.002 * window
        for tensor in (1, 2, 8):
            padded = -(-max(rows) // tensor) * tensor
            assert padded * ranks - window <= 0.01 * window
        assert layout(sharding, lengths, ranks, 8).rows == padded
        pairs.append([pairs_of(chunks) for chunks in chunks_by_rank(made)])
    work = np.array(pairs, dtype=np.float64)
    totals = work.sum(axis=0)
    assert totals.max() <= 1.01 * totals.mean()
    # Ranks wait for each other in every micro-batch, so also where the excess does not cancel.
    assert work.max(axis=1).sum() <= 1.01 * work.mean(axis=1).sum()


def test_bad_input_is_named() -> None:
    known = "hybrid, per_document_contiguous, per_document, per_sequence, ptrr"
    with pytest.raises(ValueError, match=f"'striped' is not one of {known}"):
        layout("striped", [8], 2, 1)
