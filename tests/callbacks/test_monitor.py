"""ImbalanceMonitor in real two-rank Trainer runs, beside Lightning's own ThroughputMonitor."""

import csv
import io
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from matplotlib.image import imread
from rich.console import Console

from lightning_wlb.callbacks.monitor import ImbalanceMonitor
from lightning_wlb.callbacks.run_summary import LEVELS, summary_table
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.mesh import AXES
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.schedule.actions import Action, Timing
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import trainer

WINDOW = 256
STEPS = 3
CONFIG = TransformerConfig(dim=16, layers=2, heads=2, kv_heads=2, ffn_dim=16, vocab_size=32)


def make_module() -> LanguageModule:
    return LanguageModule(CONFIG, learning_rate=1e-3, seed=1)


def make_data() -> WLBDataModule:
    # `original` packing, unshuffled: each step is a whole window, then one of short documents.
    generator = np.random.default_rng(0)
    lengths = [*[WINDOW] * 1, *[8] * (WINDOW // 8)] * (STEPS + 1)
    documents = [generator.integers(0, 32, length) for length in lengths]
    return WLBDataModule(
        documents,
        context_window=WINDOW,
        micro_batches=2,
        packing="original",
        shuffle=False,
        num_workers=0,  # the ranks are daemons
    )


def make_trainer(strategy: Any, folder: Path, callbacks: list, **options: Any) -> L.Trainer:
    usual = {"precision": "32-true", "gradient_clip_val": None, "accelerator": "cpu"}
    usual |= {"max_steps": STEPS, "log_every_n_steps": 1, "default_root_dir": folder}
    return trainer(strategy, callbacks=callbacks, **(usual | options))


class FixedTimes(L.Callback):
    """Replaces what was measured by times that are known."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        at = trainer.strategy.rank
        batch.wait_seconds = 2.0 * at.data + batch_idx
        timings = []
        for number in range(len(batch.micro_batches)):
            for kind, factor in (("F", 1.0), ("B", 2.0)):
                compute = factor * (1 + 10 * at.data + at.context + number)
                action = Action(0, kind, number)
                timings.append(Timing(action, 0.0, 99.0, compute, compute / 2))
        trainer.strategy.executor.timings = lambda: timings


def run_measured(rank: int, folder: Path) -> dict[str, Any]:
    """Two replicas, real clocks, a CSV log, ThroughputMonitor beside."""
    monitor = ImbalanceMonitor(warm_up_steps=1)
    beside = ThroughputMonitor(batch_size_fn=lambda batch: batch.tokens, window_size=2)
    runner = make_trainer(
        WLBStrategy(2), folder, [monitor, beside], devices=2, logger=CSVLogger(folder)
    )
    begin = time.perf_counter()
    runner.fit(make_module(), make_data())
    return {
        "seconds": time.perf_counter() - begin,
        "summary": monitor.summary(),
        "picture": monitor.heat_map_path,
        "log": Path(runner.log_dir or ""),
    }


def run_fixed(rank: int, mesh: tuple[int, int, int, int], folder: Path) -> dict[str, Any]:
    monitor = ImbalanceMonitor(heat_map=str(folder / "chosen.png"), warm_up_steps=0)
    runner = make_trainer(
        WLBStrategy(*mesh), folder, [FixedTimes(), monitor], devices=2, logger=False
    )
    runner.fit(make_module(), make_data())
    logged = {name: float(value) for name, value in runner.logged_metrics.items()}
    return {"summary": monitor.summary(), "logged": logged}


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "measured": run_measured(rank, folder),
        "data": run_fixed(rank, (2, 1, 1, 1), folder),
        "context": run_fixed(rank, (1, 1, 2, 1), folder),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("monitor")
    return run_ranks(run_all, 2, folder, process_group=False), folder


def test_every_figure_is_in_the_logger(runs):
    results, _ = runs
    with open(results[0]["measured"]["log"] / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("wlb/tokens")]
    assert len(rows) == STEPS
    work = Work.of(CONFIG.shape)
    heavy, light = work.total(WINDOW), WINDOW // 8 * work.total(8)
    steps, waits = [], []
    for row in rows:
        value = {name[4:]: float(row[name]) for name in row if name.startswith("wlb/")}
        assert value["tokens"] == 2 * WINDOW
        assert value["target_tokens"] == 2 * WINDOW - 1 - WINDOW // 8
        assert (value["delay_mean"], value["delay_max"]) == (0, 0)
        planned = heavy * 2 / (heavy + light)
        assert planned > 1.3
        assert value["imbalance_pipeline_planned"] == pytest.approx(planned, rel=1e-5)
        assert value["imbalance_data_planned"] == pytest.approx(planned, rel=1e-5)
        assert 1 <= value["imbalance_pipeline"] <= 2
        assert 1 <= value["imbalance_data"] <= 2
        # One context rank: nothing to wait for; attention was timed, or it would be missing.
        assert value["imbalance_context"] == 1
        seconds = value["step_seconds"]
        assert seconds > 0
        assert value["loader_wait_seconds"] > 0
        steps.append(seconds)
        waits.append(value["loader_wait_seconds"])
        assert value["tokens_per_second_per_device"] == pytest.approx(WINDOW / seconds, rel=1e-5)
        tflops = (heavy + light) / seconds / 2 / 1e12
        assert value["tflops_per_device"] == pytest.approx(tflops, rel=1e-5)
        assert "mfu" not in value
    # The time of the slowest rank each: no more than the run, on one rank, and on both.
    assert sum(steps) <= max(rank["measured"]["seconds"] for rank in results)
    assert sum(waits) <= sum(rank["measured"]["seconds"] for rank in results)
    assert any("samples_per_sec" in name for name in rows[-1])


def test_summaries_agree_on_all_ranks(runs):
    results, _ = runs
    for name in ("measured", "data", "context"):
        one, other = (results[rank][name]["summary"] for rank in range(2))
        assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True)
    summary = results[0]["measured"]["summary"]
    assert (summary["steps"], summary["timed_steps"]) == (STEPS, STEPS - 1)
    assert summary["tokens"] == STEPS * 2 * WINDOW
    # A step of two windows: the time per token follows from the time per step.
    assert summary["seconds_per_million_tokens"] == pytest.approx(
        summary["seconds_per_step"] / (2 * WINDOW) * 1e6
    )


def test_times_of_all_ranks_meet_in_the_degrees(runs):
    results, _ = runs
    for rank in results:
        # Data: micro-batches of 3·1 and 3·11 seconds.
        logged = rank["data"]["logged"]
        assert logged["wlb/imbalance_pipeline"] == pytest.approx(33 * 2 / 36)
        assert logged["wlb/imbalance_data"] == pytest.approx(33 * 2 / 36)
        assert logged["wlb/imbalance_context"] == 1
        # Of replica 1, which waited longest, in the last step and on average.
        assert logged["wlb/loader_wait_seconds"] == 2 + STEPS - 1
        assert rank["data"]["summary"]["loader_wait_seconds"] == 2 + (STEPS - 1) / 2
        # Context: two micro-batches of 3·(1, 2) and 3·(2, 3) seconds on the two ranks.
        logged = rank["context"]["logged"]
        assert logged["wlb/imbalance_pipeline"] == pytest.approx(9 * 2 / 15)
        assert logged["wlb/imbalance_data"] == 1
        assert logged["wlb/imbalance_context"] == pytest.approx((2 + 3) / (1.5 + 2.5))
        summary = rank["context"]["summary"]
        assert summary["imbalance_context_aggregate"] == pytest.approx(5 / 4)


def test_heat_map_on_rank_zero_only(runs):
    results, folder = runs
    measured = [rank["measured"] for rank in results]
    assert measured[0]["picture"] == measured[0]["log"] / "imbalance.png"
    assert measured[1]["picture"] is None
    assert measured[0]["log"].is_relative_to(folder)
    height, width = imread(measured[0]["picture"]).shape[:2]
    assert 900 <= width <= 2000
    assert 300 <= height <= 900
    assert (folder / "chosen.png").exists()


def fit_without_picture(rank: int, folder: Path) -> tuple[Path | None, float]:
    (folder / "imbalance.png").mkdir()
    monitor = ImbalanceMonitor(warm_up_steps=0)
    run = make_trainer(WLBStrategy(1, 1, 1, 1), folder, [monitor], logger=False, devices=1)
    with pytest.warns(match=r"The heat map \S+imbalance\.png was not written: .*Is a directory"):
        run.fit(make_module(), make_data())
    return monitor.heat_map_path, monitor.summary()["steps"]


def test_a_heat_map_that_cannot_be_written_does_not_end_the_run(tmp_path: Path):
    assert run_ranks(fit_without_picture, 1, tmp_path, process_group=False) == [(None, STEPS)]


def test_the_table_shows_the_run():
    summary = {
        f"imbalance_{level}_{how}": 1 + number / 8 + figure / 64
        for number, level in enumerate(LEVELS)
        for figure, how in enumerate(("mean", "p99", "aggregate"))
    }
    summary |= {"steps": 7, "timed_steps": 5, "tokens": 12345, "tokens_per_step": 1763.6}
    summary |= {"tokens_per_step_spread": 0.0456}
    summary |= {"seconds_per_step": 0.25, "seconds_per_step_p99": 0.5}
    summary |= {"seconds_per_step_predicted": 0.2, "loader_wait_seconds": 0.01}
    summary |= {"loader_wait_seconds_p99": 0.04, "loader_wait_share": 0.0385}
    summary |= {"seconds_per_million_tokens": 141.8, "tokens_per_second_per_device": 3527}
    summary |= {"tflops_per_device": 0.012, "delay_mean": 0.53, "delay_max": 4, "drain_steps": 0}
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(summary_table(summary, {"data": 2, "pipeline": 2, "context": 1, "tensor": 1}))
    rows = [re.split(r"[\s│]{2,}", line.strip(" │")) for line in console.export_text().split("\n")]
    assert ["imbalance, pipeline level", "1.000", "1.016", "1.031"] in rows
    assert not any("context" in row[0] for row in rows)
    assert ["step time (s)", "0.250", "0.500"] in rows
    assert ["wait for the loader (s)", "0.010", "0.040", "3.9%"] in rows
    assert ["as predicted (profile)", "0.200"] in [[cell.strip() for cell in row] for row in rows]
    assert ["delay (steps)", "0.530", "max 4"] in rows
    assert ["tokens per step", "1,764", "± 4.6%"] in rows
    assert not any(row[0].startswith("model FLOP util") for row in rows)
    # Of a run that is all warm-up nothing is measured, and nothing waits.
    for name in summary:
        if name.startswith(("seconds", "loader", "tokens_per_second", "tflops")):
            summary[name] = float("nan")
    console.print(
        summary_table(summary | {"timed_steps": 0, "delay_max": 0}, dict.fromkeys(AXES, 1))
    )
    text = console.export_text()
    assert "7 steps, 12,345 tokens; all of them warm-up, so that no time is shown." in " ".join(
        text.split()
    )
    assert not any(word in text for word in ("nan", "–", "imbalance,", "delay", "(s)"))


def test_wrong_use_is_answered(tmp_path: Path):
    monitor = ImbalanceMonitor()
    runner = make_trainer("auto", tmp_path, [monitor], devices=1, logger=False)
    with pytest.raises(MisconfigurationException, match="strategy='wlb'"):
        runner.fit(make_module(), make_data())
    with pytest.raises(RuntimeError, match="fit"):
        monitor.summary()
    with pytest.raises(ValueError, match="warm_up_steps=-1"):
        ImbalanceMonitor(warm_up_steps=-1)


def predict(rank: int, folder: Path) -> dict:
    """A run whose profile is of another device, and one whose profile says so."""
    fast = replace(Profile.load("h100"), device_type="cpu", dtype="float32")
    monitor = ImbalanceMonitor(heat_map=False, profile=fast)
    options = {"devices": 1, "max_steps": 7, "max_epochs": -1, "logger": False}
    trainer = make_trainer(WLBStrategy(), folder, [monitor], **options)
    trainer.fit(make_module(), make_data())
    other = make_trainer(WLBStrategy(), folder, [ImbalanceMonitor(profile="h100")], **options)
    with pytest.raises(ValueError, match="h100") as refused:
        other.fit(make_module(), make_data())
    return {
        "summary": monitor.summary(),
        "logged": dict(trainer.callback_metrics),
        "refused": str(refused.value),
    }


def test_a_cpu_is_not_an_h100(tmp_path: Path):
    (result,) = run_ranks(predict, 1, tmp_path, process_group=False)
    summary = result["summary"]
    assert 0 < summary["seconds_per_step_predicted"] < summary["seconds_per_step"] / 2
    assert summary["imbalance_pipeline_predicted_aggregate"] >= 1
    assert summary["imbalance_context_predicted_aggregate"] == 1
    assert result["logged"]["wlb/step_seconds_predicted"] > 0
    assert "cpu" in result["refused"]
