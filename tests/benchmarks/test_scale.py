"""The benchmark of scale runs and ends with JSON; times are judged by hand."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.scale import CASES, main


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read as Linux counts it")
def test_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.scale.CASES", CASES[2:3])
    main(["--documents", "20000"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = result["rows"]
    assert result["documents"] == 20_000
    assert row["held_out"] == 10_000
    assert row["state_bytes"] < 100_000
    # A store of 20,000 documents: whatever a process needs beside it is far below the limit.
    assert 0 <= row["memory_mb"] < 200
