"""The benchmark of Hydraulis' assignment runs, and no dealing is below the least possible."""

from __future__ import annotations

import json

import pytest

from benchmarks.two_stage import main


def test_the_last_line_is_json(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.two_stage.NODES", 20)
    name = "7B on 16, 32K CommonCrawl"
    main(["--settings", name, "--steps", "1"])
    row, short = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"].values()
    exact, greedy, ours = (
        row["dealing"][way]["over_least"] for way in ("equation_3", "algorithm_1", "by_work")
    )
    assert 1 <= exact <= greedy <= ours
    times = {packing: row["steps"][packing]["step_ms"] for packing in ("best_fit", "hydraulis")}
    assert row["steps"]["auto"]["step_ms"] < times["hydraulis"] < times["best_fit"]
    # Without a pipeline the bound is the work.
    assert short["dealing"]["by_work"]["over_least"] < 1.01
