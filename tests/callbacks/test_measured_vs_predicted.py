"""Predicted beside measured, and the one warning when they part."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_wlb.callbacks.measured_vs_predicted import departure
from lightning_wlb.callbacks.monitor import ImbalanceMonitor
from lightning_wlb.cost.profile import Profile
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.callbacks.test_monitor import make_data, make_module, make_trainer
from tests.ranks import run_ranks

FAST = replace(Profile.load("h100"), device_type="cpu", dtype="float32")


def figures(step: float, pipeline: float) -> dict[str, float]:
    levels = {"pipeline": pipeline, "data": 1.1, "context": 1.0}
    return {
        "seconds_per_step": step,
        "seconds_per_step_predicted": 2.0,
        **{f"imbalance_{name}_aggregate": value for name, value in levels.items()},
        **{f"imbalance_{name}_predicted_aggregate": 1.1 for name in levels},
    }


def test_within_a_fifth_there_is_nothing_to_say():
    assert departure(figures(2.39, 1.3), FAST) is None


def test_where_they_part_the_level_and_the_profile_are_named():
    said = departure(figures(2.5, 1.4), FAST)
    assert "step time (s) measured 2.5, predicted 2;" in said
    assert "pipeline-level imbalance measured 1.4, predicted 1.1." in said
    assert "data-level" not in said
    assert FAST.provenance in said
    assert "lightning-wlb profile" in said


def predict(rank: int, folder: Path) -> dict:
    """A run whose profile is of another device, and one whose profile says so."""
    monitor = ImbalanceMonitor(heat_map=False, profile=FAST)
    options = {"devices": 1, "max_steps": 7, "max_epochs": -1, "logger": False}
    trainer = make_trainer(WLBStrategy(), folder, [monitor], **options)
    compared = pytest.MonkeyPatch()
    compared.setattr("lightning_wlb.callbacks.monitor.STEPS", 3)
    with pytest.warns(UserWarning, match="departs from prediction") as caught:
        trainer.fit(make_module(), make_data())
    compared.undo()
    said = [str(each.message) for each in caught if "departs" in str(each.message)]
    other = make_trainer(WLBStrategy(), folder, [ImbalanceMonitor(profile="h100")], **options)
    with pytest.raises(ValueError, match="h100") as refused:
        other.fit(make_module(), make_data())
    return {
        "said": said,
        "summary": monitor.summary(),
        "logged": dict(trainer.callback_metrics),
        "refused": str(refused.value),
    }


def test_a_cpu_is_not_an_h100(tmp_path: Path):
    (result,) = run_ranks(predict, 1, tmp_path, process_group=False)
    assert len(result["said"]) == 1
    summary = result["summary"]
    assert 0 < summary["seconds_per_step_predicted"] < summary["seconds_per_step"] / 2
    assert summary["imbalance_pipeline_predicted_aggregate"] >= 1
    assert summary["imbalance_context_predicted_aggregate"] == 1
    assert result["logged"]["wlb/step_seconds_predicted"] > 0
    assert "cpu" in result["refused"]
