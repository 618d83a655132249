"""Part 1 of the hour on a GPU starts pytest, so it is not in the default run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main

pytestmark = pytest.mark.soak


def test_part_1_counts_tests(tmp_path: Path) -> None:
    """Without a CUDA device those of kernels are skipped."""
    assert main(["--part", "1", "--device", "cpu", "--small", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu_right.json").read_text())
    kernels, gradients = result["rows"].values()
    assert kernels["passed"] + kernels["skipped"] > 50
    assert gradients["passed"] == result["summary"]["passed"] - kernels["passed"] >= 3
    assert result["summary"]["failed"] == 0
