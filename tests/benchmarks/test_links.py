"""The benchmark of links runs and ends with JSON; times are judged by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.links import main


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "8", "32", "--layers", "4", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, four = result["rows"]
    assert (one["pipelines"], one["slots"], one["gigabytes_in"]) == (2, 6, 0)
    assert 0 < four["gigabytes_in"] < four["gigabytes_in_one_hop"]
