"""Generator A and the committed lengths are those that the figures are about."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.workloads import (
    CORPORA,
    REFERENCE_WORK,
    generator_a,
    stdlib_lengths,
    window_pieces,
)

WINDOW = 131_072


def test_generator_a_is_reproducible_and_heavy_tailed() -> None:
    lengths = generator_a(300_000, WINDOW, 0)
    assert lengths.dtype == np.int64
    assert (lengths.min(), lengths.max()) == (32, WINDOW)
    assert lengths.mean() == pytest.approx(2600, rel=0.02)
    assert np.median(lengths) == pytest.approx(np.exp(6.8), rel=0.02)
    # A hundredth of the documents is drawn from the tail, which begins at 8192 tokens.
    assert (lengths == WINDOW).mean() == pytest.approx(0.01 * (8192 / WINDOW) ** 0.3, rel=0.1)
    assert np.array_equal(lengths, generator_a(300_000, WINDOW, 0))
    assert not np.array_equal(lengths, generator_a(300_000, WINDOW, 1))


def test_pieces_fill_windows_exactly() -> None:
    lengths = generator_a(2000, 8192, 3)
    pieces = window_pieces(lengths, 8192)
    assert pieces.sum() == lengths.sum()
    ends = np.cumsum(pieces)
    assert set(range(8192, int(ends[-1]), 8192)) <= set(ends.tolist())


def test_reference_cost() -> None:
    token = REFERENCE_WORK.forward(1)
    assert REFERENCE_WORK.forward(49_408) / token == pytest.approx(2 * 49_408, rel=1e-4)
    assert REFERENCE_WORK.total(42_350) / REFERENCE_WORK.total(1) == pytest.approx(
        2 * 42_350, rel=1e-4
    )


def test_standard_library_lengths() -> None:
    """Lengths of Python 3.11: median 6.8K, p99 163K, maximum 757K."""
    lengths = stdlib_lengths()
    assert lengths.min() > 0
    assert np.median(lengths) == pytest.approx(6.8e3, rel=0.01)
    assert np.percentile(lengths, 99) == pytest.approx(163e3, rel=0.01)
    assert lengths.max() == 757_011


def test_corpora_are_bounded_and_of_the_seed() -> None:
    for corpus in CORPORA.values():
        lengths = corpus.lengths(20_000, 65_536, seed=3)
        assert lengths.min() >= 16
        assert lengths.max() <= 65_536
        assert (lengths < 4096).mean() > 0.7  # short documents dominate, as the paper's §2 says
        assert (lengths == corpus.lengths(20_000, 65_536, seed=3)).all()
