"""The calibration gate, the balance that packings must reach on Generator A, and the output."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import packing
from benchmarks.packing import CASES, GATE, TOLERANCE, WINDOW, calibration, main, many
from benchmarks.packing_report import targets
from benchmarks.packing_runs import measure
from benchmarks.workloads import documents_for, generator_a, window_pieces
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing.base import Mesh


def test_calibration_gate() -> None:
    """Original on 300,000 documents has max·N/Σ = 1.434 ± 0.02."""
    gate = calibration()
    assert gate["imbalance_forward_mean"] == pytest.approx(1.434, abs=0.02)
    assert gate["passed"] is True


@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_calibration_gate_of_fixed_length_packing(window) -> None:
    lengths = generator_a(300_000, WINDOW, 0)
    data = DataSettings(WINDOW, 4, packing="fixed_greedy", packing_window=window, shuffle=False)
    value = measure(lengths, data, 800)["imbalance_forward_mean"]
    assert value == pytest.approx(GATE[f"fixed_greedy/{window}"], abs=TOLERANCE)


def streams(steps: int) -> list[np.ndarray]:
    documents = documents_for(steps, 4, WINDOW)
    return [window_pieces(generator_a(documents, WINDOW, seed), WINDOW) for seed in (1, 2, 3)]


def mean_of(data: DataSettings, steps: int, warm: int = 0) -> dict[str, float]:
    runs = [measure(pieces, data, steps, warm=warm) for pieces in streams(steps + warm + 10)]
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def test_wlb_with_two_queues_is_balanced() -> None:
    """Cap 1.25·C, forward as in the paper's Table 2, over three seeds: at most 1.05."""
    data = DataSettings(WINDOW, 4, packing="wlb", cap=WINDOW * 5 // 4, queues=2, shuffle=False)
    mean = mean_of(data, 150)
    assert mean["imbalance_forward_mean"] <= 1.05
    assert mean["imbalance_mean"] <= 1.05
    assert 0.97 <= mean["tokens_per_step"] <= 1.0
    assert mean["delay_mean"] <= 0.7


def test_tapered_takes_a_quarter_off_the_step_at_half_the_delay() -> None:
    tapered = mean_of(DataSettings(WINDOW, 4, packing="tapered", shuffle=False), 150, 30)
    wlb = mean_of(DataSettings(WINDOW, 4, packing="wlb", shuffle=False), 150, 30)
    assert tapered["time_over_work"] <= 1.46
    assert wlb["time_over_work"] >= 1.70
    assert tapered["delay_mean"] <= 0.3 <= wlb["delay_mean"]
    assert tapered["delay_max"] <= 12
    assert tapered["tokens_least"] >= 0.44


def test_balanced_is_as_even_as_wlb_at_half_the_delay() -> None:
    balanced = mean_of(DataSettings(WINDOW, 4, packing="balanced", shuffle=False), 150, 30)
    assert balanced["imbalance_mean"] <= 1.03
    assert balanced["delay_mean"] <= 0.32
    assert abs(balanced["imbalance_forward_mean"] - balanced["imbalance_backward_mean"]) <= 0.01


def test_time_is_that_of_the_slowest_replica() -> None:
    """Four equal documents on four replicas of one stage: the work itself; on three, double."""
    data = DataSettings(100, 4, packing="best_fit", shuffle=False)
    lengths = np.array([100] * 40)
    assert measure(lengths, data, 5, Mesh(4, 1))["time_over_work"] == pytest.approx(1)
    assert measure(lengths, data, 5, Mesh(3, 1))["time_over_work"] == pytest.approx(6 / 4)
    figures = measure(lengths, data, 5, Mesh(1, 4))
    assert figures["time_over_work"] == pytest.approx(7 / 4, rel=1e-3)
    assert figures["formula_over_work"] == pytest.approx(7 / 4, rel=1e-3)
    assert figures["time_over_equal"] == pytest.approx(1, rel=1e-3)
    assert figures["steps"] == 5


def test_replicas_that_share_a_piece_each_do_a_part_of_it() -> None:
    """A document for four replicas takes a quarter on each, and the 10 % that sharing adds."""
    data = DataSettings(4096, 1, packing="auto", shuffle=False)
    figures = measure(np.array([4096] * 8), data, 5, Mesh(4, 1))
    assert figures["time_over_work"] == pytest.approx(1.1, abs=0.001)


def test_many_is_fast_and_even() -> None:
    result = many()
    assert result["imbalance"] <= 1.0001
    assert result["ms"] <= 100  # 13 on an idle core


ARGUMENTS = ["--steps", "3", "--seeds", "1", "--counts", "4", "--caps", "1.5", "--parts", "methods"]


def test_last_line_is_json_and_rows_are_kept(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(packing, "CASES", [case for case in CASES if case[2].replicas == 1])
    path = tmp_path / "packing.json"
    arguments = [*ARGUMENTS, "--workloads", "generator_a", "--output", str(path)]
    main(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    methods = result["methods"]
    assert {"generator_a/4/1/original", "generator_a/4/1.5/wlb", "generator_a/4/1/auto"} <= set(
        methods
    )
    defaults = [name for name in methods if name.endswith("/default")]
    assert defaults
    for name in defaults:
        assert methods[name] == methods[name.replace("default", result["default"])]
    assert json.loads(path.read_text())["methods"] == methods
    assert "| generator_a/4/1.5/balanced |" in path.with_suffix(".md").read_text()

    def once(*arguments):
        raise AssertionError("a row that is there was run again")

    monkeypatch.setattr(packing, "averaged", once)
    main(arguments)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["methods"] == methods
    with pytest.raises(AssertionError, match="run again"):
        main([*arguments, "--seeds", "2"])


def test_targets_say_what_was_missed() -> None:
    figures = {"time_over_work": 1.5, "delay_mean": 0.2, "imbalance_mean": 1.0, "tokens_least": 0.4}
    rows = targets({"generator_a/4/1/tapered": figures, "stdlib/4/1.5/balanced": figures})
    assert [(row["figure"], row["met"]) for row in rows] == [
        ("time_over_work", False), ("delay_mean", True), ("imbalance_mean", True),
        ("tokens_least", False),
    ]  # fmt: skip
