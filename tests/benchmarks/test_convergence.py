from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lightning_wlb as wlb
from benchmarks import convergence_runs
from benchmarks.convergence import summarise
from benchmarks.convergence_runs import Curves, Run, Settings, train

SMALL = Settings(
    tokens=512, context_window=32, micro_batches=2, packing_window=2, dim=16, layers=1,
    vocabulary=32, points=4,
)  # fmt: skip


def documents(settings: Settings) -> wlb.InMemoryDocuments:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 40, 200)
    return wlb.InMemoryDocuments([rng.integers(0, 32, n) for n in lengths], vocab_size=32)


def test_runs_of_one_seed_differ_by_their_packing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence_runs, "stdlib_documents", documents)
    runs = {
        packing: train(SMALL, Run(packing, "step", 1))
        for packing in ("original", "fixed_greedy", "wlb")
    }
    for run in runs.values():
        assert SMALL.tokens <= run["tokens"] < SMALL.tokens + 2 * 2 * SMALL.context_window
        assert len(run["training"]["loss"]) == SMALL.points
        assert len(run["held_out"]["loss"]) == SMALL.points // 2
        # Random tokens: nothing to learn beyond a uniform guess.
        assert 3.0 < run["final_held_out"] < 4.0
    assert (runs["original"]["delay_mean"], runs["original"]["steps"]) == (0, 8)
    assert (runs["fixed_greedy"]["delay_mean"], runs["fixed_greedy"]["delay_max"]) == (0.5, 1)
    assert runs["wlb"]["delay_mean"] > 0
    assert train(SMALL, Run("original", "step", 1)) == runs["original"]
    other = train(SMALL, Run("original", "step", 2))
    assert other["training"]["loss"] != runs["original"]["training"]["loss"]


def test_curves_by_hand() -> None:
    curves = Curves(replace(SMALL, points=2), [])
    # 400 tokens in two points of 200, by the middle of a step; the last fifth is the last step.
    curves.steps = [(150, 100, 500.0, 1.0, 3), (150, 100, 300.0, 0.0, 0), (100, 50, 100.0, 2.0, 4)]
    curves.evaluated = [(150, 4.0), (400, 3.0)]
    result = curves.result()
    assert result["training"] == {"tokens": [200, 400], "loss": [5.0, 400 / 150]}
    assert (result["final_training"], result["final_held_out"]) == (2.0, 3.0)
    assert (result["delay_mean"], result["delay_max"]) == (350 / 400, 4)


def result(training: float, held_out: float, delay: float = 0.0) -> dict[str, Any]:
    curve = {"tokens": [100, 200], "loss": [2 * training, training]}
    return {
        "delay_mean": delay, "delay_max": round(delay), "tokens_variation": 0.0, "training": curve,
        "held_out": curve, "final_training": training, "final_held_out": held_out,
    }  # fmt: skip


RESULTS = {
    "original/step/0": result(4.0, 5.0),
    "original/step/1": result(5.0, 5.0),
    "original/step/2": result(9.0, 9.0),
    "fixed_greedy/step/0": result(4.4, 5.0, 3.0),
    "fixed_greedy/step/1": result(5.0, 5.5, 4.0),
}


def test_differences_are_those_of_the_same_seed() -> None:
    control, delayed = summarise(RESULTS)
    assert (control["seeds"], control["final_training"]) == (3, 6.0)
    assert control["final_training_spread"] == pytest.approx(7**0.5)
    assert "final_training_percent" not in control
    assert (delayed["delay_mean"], delayed["delay_max"]) == (3.5, 4)
    assert delayed["final_training_percent"] == pytest.approx(5.0)  # +10 % and 0 %
    assert delayed["final_training_percent_spread"] == pytest.approx(50**0.5)
    assert delayed["final_held_out_percent"] == pytest.approx(5.0)
