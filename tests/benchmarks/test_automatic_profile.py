"""The measured comparison of packings: its figures, by hand."""

from __future__ import annotations

import pytest

from benchmarks.automatic_profile import figures
from benchmarks.measured import RankStep
from lightning_wlb.mesh import Mesh
from tests.prediction.test_predictor import plan_of


def step(rank: int, wall: float) -> RankStep:
    """Two micro-batches of 10 tokens: a forward takes 1 s, a backward 2 s."""
    order = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")[rank].split()
    return RankStep(
        plan=plan_of([[[10], [10]]]).to_json(),
        begin=5.0,
        wall=wall,
        compute=[(text, 1.0 if text[1] == "F" else 2.0) for text in order],
        held=[],
        stages=[(0, 1), (1, 2)],
    )


def test_time_per_token_is_of_the_slowest_rank_and_of_the_replayed_schedule() -> None:
    found = figures([[step(0, 7.0)], [step(1, 8.0)]], Mesh(pipeline=2))
    assert found["tokens"] == 20
    assert found["wall_us_per_token"] == pytest.approx(8e6 / 20)
    assert found["with_planning_us_per_token"] == pytest.approx(7e6 / 20)
    # 1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7, 0B1 7-9.
    assert found["replayed_us_per_token"] == pytest.approx(9e6 / 20)
    assert found["cpu_us_per_token"] == pytest.approx(12e6 / 20)
    assert found["bubble"] == pytest.approx(1 - 12 / 18)
    assert found["micro_batches"] == 2
