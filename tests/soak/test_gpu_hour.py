"""Part 1 of the hour on a GPU starts pytest, so it is not in the default run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main

pytestmark = pytest.mark.soak


def test_part_1_counts_the_tests_of_a_file(tmp_path: Path) -> None:
    """Without a CUDA device they are skipped, and the reason is kept."""
    assert main(["--part", "1", "--device", "cpu", "--small", "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "gpu_right.json").read_text())["rows"].values()
    assert row["failed"] == 0
    assert row["passed"] + row["skipped"] > 50
