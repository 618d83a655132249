"""Where lengths come from."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_wlb.cli.lengths import load_lengths
from lightning_wlb.planning.workloads import documents_for, generator_a

SETTINGS = {"context_window": 4096, "micro_batches": 2, "steps": 3, "seed": 1}


def test_the_generator_makes_enough_documents() -> None:
    lengths = load_lengths("generator-a", **SETTINGS)
    count = documents_for(3, 2, 4096)
    assert np.array_equal(lengths, generator_a(count, 4096, 1))
    assert lengths.max() <= 4096


def test_text_may_have_words_or_lines(tmp_path) -> None:
    path = tmp_path / "lengths"
    path.write_text("3 1\n4\n\n1 5\n")
    assert load_lengths(str(path), **SETTINGS).tolist() == [3, 1, 4, 1, 5]


def test_pickled_arrays_are_not_loaded(tmp_path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a list of lengths"):
        load_lengths(str(path), **SETTINGS)
