"""A run's figures from records written by hand."""

import math

import pytest

from lightning_wlb.callbacks.imbalance import Level
from lightning_wlb.callbacks.run_summary import Records, StepRecord


def record(
    tokens: float = 100,
    seconds: float = 1.0,
    wait: float = 0.0,
    pipeline: tuple[float, float] = (2.0, 1.0),
    delay: tuple[float, float] = (0.0, 0.0),
    drain: bool = False,
    context: tuple[float, float] = (1.0, 1.0),
    predicted: float = math.nan,
) -> StepRecord:
    levels = [pipeline, (3.0, 2.0), context, (5.0, 4.0), (1.0, 1.0), *[(predicted, 1.0)] * 3]
    return StepRecord(
        tokens, tokens - 10, *delay, drain, tokens * 1e6, seconds, wait, predicted,
        tuple(Level(*level) for level in levels),
    )  # fmt: skip


def test_figures_by_hand():
    records = Records(devices=2, peak_flops=1e9, warm_up_steps=1)
    records.add(record(tokens=50, seconds=30.0, wait=9.0, pipeline=(90.0, 1.0), delay=(1.0, 2)))
    records.add(record(tokens=100, seconds=1.0, pipeline=(6.0, 3.0), delay=(0.5, 5), wait=1.0))
    records.add(record(tokens=300, seconds=3.0, pipeline=(5.0, 5.0), delay=(2.0, 4), drain=True))
    summary = records.summary()
    assert len(records) == 3
    assert (summary["steps"], summary["timed_steps"], summary["tokens"]) == (3, 2, 450)
    assert summary["target_tokens"] == 420
    assert summary["tokens_per_step"] == 150
    assert summary["tokens_per_step_spread"] == pytest.approx((35000 / 3) ** 0.5 / 150)
    assert summary["seconds_per_step"] == 2.0
    assert summary["seconds_per_step_p99"] == pytest.approx(2.98)
    # The wait is apart from the step's own time.
    assert (summary["loader_wait_seconds"], summary["loader_wait_share"]) == (0.5, 1 / 5)
    assert summary["loader_wait_seconds_p99"] == pytest.approx(0.99)
    assert summary["seconds_per_million_tokens"] == pytest.approx(4.0 / 400 * 1e6)
    assert summary["seconds_per_million_tokens_median"] == pytest.approx(1.0 / 100 * 1e6)
    assert summary["tflops_per_device_median"] == pytest.approx(100e6 / 2 / 1e12)
    assert summary["tokens_per_second_per_device"] == 400 / 4.0 / 2
    assert summary["tflops_per_device"] == pytest.approx(400e6 / 4.0 / 2 / 1e12)
    assert summary["mfu"] == pytest.approx(400e6 / 4.0 / 2 / 1e9)
    # Delay and planned figures are of all steps, warm-up or not.
    assert summary["delay_mean"] == pytest.approx((50 * 1 + 100 * 0.5 + 300 * 2) / 450)
    assert summary["delay_max"] == 5
    assert (summary["drain_steps"], summary["delay_mean_drain"]) == (1, 2.0)
    assert summary["imbalance_pipeline_mean"] == 1.5
    assert summary["imbalance_pipeline_p99"] == pytest.approx(1.99)
    assert summary["imbalance_pipeline_aggregate"] == 11 / 8
    assert summary["imbalance_data_aggregate"] == 1.5
    assert summary["imbalance_pipeline_planned_mean"] == 1.25


def test_each_strategy_has_its_figures_and_a_warm_up_of_its_own():
    records = Records(devices=1, warm_up_steps=1)
    added = [
        records.add(record(seconds=seconds, tokens=tokens), strategy)
        for strategy, seconds, tokens in [(0, 9, 1), (2, 8, 2), (0, 1, 3), (0, 3, 4), (2, 5, 5)]
    ]
    assert added == [False, False, True, True, True]
    assert records.summary()["timed_steps"] == 3
    assert records.summary()["seconds_per_step"] == 3
    of_mesh, other, none = (records.summary(number) for number in (0, 2, 1))
    assert (of_mesh["steps"], of_mesh["timed_steps"], of_mesh["seconds_per_step"]) == (3, 2, 2)
    assert (other["steps"], other["timed_steps"], other["seconds_per_step"]) == (2, 1, 5)
    assert (of_mesh["tokens"], other["tokens"], none["steps"]) == (8, 7, 0)


def test_unknown_figures_are_left_out_or_not_a_number():
    records = Records(devices=1, warm_up_steps=3)
    records.add(record(context=(0.0, 0.0)))
    summary = records.summary()
    assert "mfu" not in summary
    assert "delay_mean_drain" not in summary
    for name in ("seconds_per_step", "seconds_per_million_tokens", "imbalance_context_mean"):
        assert math.isnan(summary[name]), name
    assert summary["imbalance_pipeline_planned_aggregate"] == 1.25
    assert Records(devices=1).summary()["steps"] == 0
    # Steps without attention do not enter the context level.
    records = Records(devices=1)
    for context in ((0.0, 0.0), (3.0, 2.0)):
        records.add(record(context=context))
    assert records.summary()["imbalance_context_mean"] == 1.5


def test_predictions_stand_beside_measurements_of_the_same_steps():
    records = Records(devices=1, warm_up_steps=1)
    records.add(record(predicted=100.0))
    records.add(record(predicted=2.0))
    records.add(record(predicted=4.0))
    summary = records.summary()
    assert summary["seconds_per_step_predicted"] == 3.0
    assert summary["imbalance_context_predicted_aggregate"] == 3.0
    without = Records(devices=1)
    without.add(record())
    assert math.isnan(without.summary()["seconds_per_step_predicted"])
