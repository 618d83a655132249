"""The benchmark of shardings on a few sequences."""

import json
from pathlib import Path

import pytest

from benchmarks import context_parallel


def test_rows_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--windows 65536 --ranks 4 --sequences 4 --overheads 2"
    context_parallel.main([*options.split(), "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Modelled" in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["modelled"] is True
    rows = {row["sharding"]: row for row in result["rows"]}
    assert set(rows) == set(context_parallel.METHODS)
    best = rows["adaptive (ours)"]
    assert best["modelled_max_over_ideal_mean"] <= 1.02
    assert all(row["rows_max_over_mean"] <= 1.002 for row in result["rows"])
    # Plain: 3 ranks get 16K rows of 2 · 32 heads · 128 · 2 bytes.
    assert best["plain_all_gather_mib"] == 3 * 16_384 * 16_384 / 2**20
    assert best["sent_busiest_rank_mib"] < best["plain_all_gather_mib"]


def test_sequences_fill_the_window() -> None:
    every = context_parallel.sequences(65_536, 5, seed=3)
    assert [sum(lengths) for lengths in every] == [65_536] * 5
