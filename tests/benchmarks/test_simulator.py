"""The accuracy benchmark: replaying measured times, and its statistics."""

from __future__ import annotations

import pytest

from benchmarks.measured import replayed
from benchmarks.simulator import at_own_speed, summary
from lightning_wlb.mesh import Mesh
from tests.prediction.test_predictor import plan_of


def test_a_pipeline_is_replayed_with_each_ranks_times() -> None:
    plan = plan_of([[[10], [10]]])
    first = [("0F0", 1.0), ("0F1", 1.0), ("0B0", 2.0), ("0B1", 2.0)]
    second = [("1F0", 1.0), ("1B0", 2.0), ("1F1", 1.0), ("1B1", 3.0)]
    # 1F0 at 1, 1B0 until 4, 1F1 until 5, 1B1 until 8, then 0B1.
    assert replayed(Mesh(pipeline=2), plan, [first, second])[0].compute_ns == 10 * 10**9


def test_a_context_group_is_as_slow_as_its_slowest_rank() -> None:
    plan = plan_of([[[10]]])
    ranks = [[("0F0", 1.0), ("0B0", 5.0)], [("0F0", 2.0), ("0B0", 4.0)]]
    assert replayed(Mesh(context=2), plan, ranks)[0].compute_ns == 7 * 10**9


def test_replicas_wait_for_the_slowest() -> None:
    plan = plan_of([[[10]], [[10], [10]]])
    ranks = [
        [("0F0", 1.0), ("0B0", 1.0)],
        [("0F0", 1.0), ("0B0", 2.0), ("0F1", 1.0), ("0B1", 2.0)],
    ]
    assert replayed(Mesh(data=2), plan, ranks)[0].compute_ns == 6 * 10**9


def test_statistics() -> None:
    judged = [{"p": value, "m": value * factor} for value, factor in ((1, 1), (2, 1), (4, 2))]
    row = summary(judged, "p", "m")
    assert row["plans"] == 3
    assert row["median_error"] == 0
    assert row["span"] == 4
    assert row["rank_correlation"] == pytest.approx(1)


def test_own_speed_is_that_of_the_other_steps():
    steps = [
        {"predicted": 1.0, "replayed": factor, "predicted_wall": 2.0, "wall": 2.0 * factor}
        for factor in (1.5, 1.5, 1.25)
    ]
    made = at_own_speed(steps)
    assert [each["predicted_at_own_speed"] for each in made] == [1.375, 1.375, 1.5]
    assert [each["predicted_wall_at_own_speed"] for each in made] == [2.75, 2.75, 3.0]
