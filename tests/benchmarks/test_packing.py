"""The calibration gate, the balance that packings must reach on Generator A, and the output."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import packing, packing_report
from benchmarks.packing import CASES, GATE, TOLERANCE, WINDOW, main
from benchmarks.packing_runs import loads_of, measure
from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, window_pieces
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.replica_plans import replica_plan


def test_calibration_gate() -> None:
    """Original on 300,000 documents has max·N/Σ = 1.434 ± 0.02."""
    data = DataSettings(WINDOW, 4, packing="original", shuffle=False)
    value = measure(generator_a(300_000, WINDOW, 0), data, 10**6)["imbalance_forward_mean"]
    assert value == pytest.approx(1.434, abs=0.02)


@pytest.mark.parametrize("window", [4, 8])
def test_calibration_gate_of_fixed_length_packing(window) -> None:
    lengths = generator_a(300_000, WINDOW, 0)
    packing = {"method": "fixed_greedy", "packing_window": window}
    data = DataSettings(WINDOW, 4, packing=packing, shuffle=False)
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
    packing = {"method": "wlb", "queues": 2}
    data = DataSettings(WINDOW, 4, packing=packing, cap=WINDOW * 5 // 4, shuffle=False)
    mean = mean_of(data, 150)
    assert mean["imbalance_forward_mean"] <= 1.05
    assert mean["imbalance_mean"] <= 1.05
    assert 0.97 <= mean["tokens_per_step"] <= 1.0
    assert mean["delay_mean"] <= 0.7


def test_slices_take_a_third_off_the_step_without_delay() -> None:
    wlb = mean_of(DataSettings(WINDOW, 4, packing="wlb", shuffle=False), 150, 30)
    slim = mean_of(DataSettings(WINDOW, 4, packing="slim", shuffle=False), 30)
    assert slim["time_over_work"] <= 1.20
    assert wlb["time_over_work"] >= 1.70
    assert slim["delay_mean"] == 0 < 0.3 <= wlb["delay_mean"]


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


def test_loads_of_slices_and_of_shared_micro_batches_by_hand() -> None:
    """Two replicas share a micro-batch: each has half of its work and 10 % of that."""
    first, second = Slice(0, 0, 0, 1000), Slice(0, 0, 1000, 3000)
    shared = [([Slice(1, 0, 0, 4000)], (0, 1))]
    replica = replica_plan([[first], [second]], 0, "per_sequence", shared)
    work = REFERENCE_WORK.forward
    loads = [work(4000) * 110 // 200, work(1000), work(3000) - work(1000)]
    assert loads_of(work, replica) == loads


ARGUMENTS = ["--steps", "3", "--seeds", "1", "--counts", "4", "--caps", "1.5", "--parts", "methods"]


def test_last_line_is_json_and_rows_are_kept(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(packing, "CASES", [case for case in CASES if case[2].data == 1])
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
    assert "| generator_a/4/1.5/wlb |" in path.with_suffix(".md").read_text()

    def once(*arguments):
        raise AssertionError("a row that is there was run again")

    monkeypatch.setattr(packing, "averaged", once)
    main(arguments)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["methods"] == methods
    with pytest.raises(AssertionError, match="run again"):
        main([*arguments, "--seeds", "2"])


def test_rows_of_removed_methods_stay(capsys, monkeypatch, tmp_path) -> None:
    row = dict.fromkeys(packing_report.COLUMNS, 1.0)
    removed = {"note": "Gone.", "methods": {"generator_a/4/1/gone": row}}
    path = tmp_path / "packing.json"
    path.write_text(json.dumps({"removed": removed}))
    monkeypatch.setattr(packing, "averaged", lambda *arguments: row)
    monkeypatch.setattr(packing, "streams", lambda *arguments: [])
    main([*ARGUMENTS, "--workloads", "stdlib", "--output", str(path)])
    capsys.readouterr()
    assert json.loads(path.read_text())["removed"] == removed
    page = path.with_suffix(".md").read_text()
    assert page.index("| stdlib/4/1/auto |") < page.index("Gone.") < page.index("/gone |")
