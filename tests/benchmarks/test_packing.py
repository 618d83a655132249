"""The calibration gate, and the balance that wlb packing must reach on Generator A."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.packing import calibration, main, measure
from benchmarks.workloads import documents_for, generator_a, window_pieces
from lightning_wlb.planning import DataSettings

WINDOW = 131_072


def test_calibration_gate() -> None:
    """DESIGN section 6: original on 300,000 documents has max·N/Σ = 1.434 ± 0.02."""
    gate = calibration()
    assert gate["imbalance_forward_mean"] == pytest.approx(1.434, abs=0.02)
    assert gate["passed"] is True


def test_wlb_with_two_queues_is_balanced() -> None:
    """Cap 1.25·C, forward as in the paper's Table 2, over three seeds: at most 1.05."""
    data = DataSettings(WINDOW, 4, packing="wlb", cap=WINDOW * 5 // 4, queues=2, shuffle=False)
    runs = []
    for seed in (1, 2, 3):
        lengths = generator_a(documents_for(150, 4, WINDOW), WINDOW, seed)
        runs.append(measure(window_pieces(lengths, WINDOW), data, 150))
    mean = {name: np.mean([run[name] for run in runs]) for name in runs[0]}
    assert mean["imbalance_forward_mean"] <= 1.05
    assert mean["imbalance_mean"] <= 1.05
    assert 0.97 <= mean["tokens_per_step"] <= 1.0
    assert mean["delay_mean"] <= 0.7


def test_last_line_is_json(capsys, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.packing.calibration", lambda: {
        "imbalance_forward_mean": 1.434, "passed": True,
    })  # fmt: skip
    main(["--steps", "3", "--seeds", "1", "--window", "8192", "--queues", "2", "--caps", "1.5"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["packing"] for row in result["rows"]] == ["original", "wlb"]
    assert [row["cap"] for row in result["rows"]] == [1.0, 1.5]
    assert result["gate"]["passed"] is True
    assert result["rows"][0]["steps"] == 3
