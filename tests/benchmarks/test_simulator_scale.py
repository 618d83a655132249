"""The benchmark of the simulator's scale runs and ends with JSON; times are judged by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulator_scale import main


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["replicas"] for row in result["rows"]] == [1] * 4 + [64] * 4
    assert all(row["cpu_ms_median"] > 0 for row in result["rows"])
