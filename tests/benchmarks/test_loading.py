"""The benchmark of loading runs and ends with JSON; memory at this size is mostly not weights."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from benchmarks.loading import main


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--width", "64", "--layers", "4", "--meshes", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["model"] for row in result["rows"]] == ["llama", "mixtral"]
    for row in result["rows"]:
        # Two bytes are read for four that are held.
        assert row["read_mb"] == pytest.approx(row["share_mb"] / 2, abs=0.1)
    assert result["built_without_memory"]["parameters_b"] == 70.6
    assert result["built_without_memory"]["process_mb"] < 1024
