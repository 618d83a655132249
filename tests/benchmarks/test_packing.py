"""The calibration gate, and the balance that packings must reach on Generator A."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fixed_greedy import FixedGreedyPacker
from benchmarks.packing import GATE, TOLERANCE, WINDOW
from benchmarks.packing_runs import loads_of, measure
from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, window_pieces
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.replica_plans import replica_plan


@pytest.mark.parametrize(
    "window",
    [None, pytest.param(4, marks=pytest.mark.soak), pytest.param(8, marks=pytest.mark.soak)],
)
def test_calibration_gate(window: int | None) -> None:
    """Original on 300,000 documents has max·N/Σ = 1.434 ± 0.02, fixed-length packing its own."""
    method: dict[str, object] = {"method": "original"}
    expected, tolerance = 1.434, 0.02
    if window is not None:
        method = {"method": FixedGreedyPacker, "packing_window": window}
        expected, tolerance = GATE[f"fixed_greedy/{window}"], TOLERANCE
    data = DataSettings(WINDOW, 4, packing=method, shuffle=False)
    steps = 10**6 if window is None else 800
    value = measure(generator_a(300_000, WINDOW, 0), data, steps)["imbalance_forward_mean"]
    assert value == pytest.approx(expected, abs=tolerance)


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
