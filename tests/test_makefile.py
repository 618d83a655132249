"""What targets of the Makefile do before they run anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("found", "ran"), [(0, True), (1, False)])
def test_gpu_tests_need_a_gpu(found: int, ran: bool, tmp_path: Path) -> None:
    """Where all would be skipped it is no success."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exit {found}; fi\necho "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "-C", ROOT, "test-gpu", f"RUN={python}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) == ran
    assert ("-m pytest -m gpu" in done.stdout) == ran
    assert ("sees no CUDA device" in done.stdout) != ran
