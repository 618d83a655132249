"""The measured comparison of packings: its figures, by hand."""

from __future__ import annotations

import pytest

from benchmarks.measured import RankStep
from benchmarks.slimpack_measured import figures
from lightning_wlb.mesh import Mesh
from tests.prediction.test_predictor import plan_of


def step(rank: int, wall: float, held: list[int]) -> RankStep:
    """Two micro-batches of 10 tokens: a forward takes 1 s, a backward 2 s."""
    order = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")[rank].split()
    return RankStep(
        plan=plan_of([[[10], [10]]]).to_json(),
        begin=5.0,
        wall=wall,
        compute=[] if held else [(text, 1.0 if text[1] == "F" else 2.0) for text in order],
        held=held,
        stages=[(0, 1), (1, 2)],
    )


def test_time_per_token_is_of_the_slowest_rank_and_of_the_replayed_schedule() -> None:
    found = figures([[step(0, 7.0, [])], [step(1, 8.0, [])]], Mesh(pipeline=2))
    assert found["tokens"] == 20
    assert found["wall_us_per_token"] == pytest.approx(8e6 / 20)
    assert found["with_planning_us_per_token"] == pytest.approx(7e6 / 20)
    # 1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7, 0B1 7-9.
    assert found["replayed_us_per_token"] == pytest.approx(9e6 / 20)
    assert found["cpu_us_per_token"] == pytest.approx(12e6 / 20)
    assert found["bubble"] == pytest.approx(1 - 12 / 18)
    assert found["micro_batches"] == 2


def test_the_peak_is_that_of_the_fullest_rank() -> None:
    epoch = [
        [step(0, 1.0, [3, 5, 0]), step(0, 1.0, [3, 0])],
        [step(1, 1.0, [4, 0]), step(1, 1.0, [1, 0])],
    ]
    assert figures(epoch, Mesh(pipeline=2)) == {"peak_bytes": 5, "peak_bytes_median_step": 4.0}
