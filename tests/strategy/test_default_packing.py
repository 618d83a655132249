"""The default packing in real runs: slices and shared documents, in training and in evaluation.

Documents are long enough to be sliced, so that what the planner makes of its own is what runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_wlb.callbacks.monitor import ImbalanceMonitor
from lightning_wlb.cost.flops import Work
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.plan import StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import (
    VOCABULARY,
    Case,
    Recorder,
    config,
    module,
    relative_error,
    trainer,
)

WINDOW = 1300
STEPS = 3
CASE = Case()
# One document of most of a step's work, then many short ones.
LENGTHS = (1300, 90, 40, 500, 1300, 610, 200, 7, 1, 80, 1200, 350, 60, 1300, 33, 800)

# name: (mesh, schedule)
RUNS: dict[str, tuple[tuple[int, ...], str]] = {
    "pipeline": ((1, 2, 1, 1), "1f1b"),
    "gpipe": ((1, 2, 1, 1), "gpipe"),
    "data": ((2, 1, 1, 1), "1f1b"),
}


def store(seed: int) -> InMemoryDocuments:
    generator = np.random.default_rng(seed)
    lengths = generator.permutation(LENGTHS)
    return InMemoryDocuments(
        [generator.integers(0, VOCABULARY, length) for length in lengths], vocab_size=VOCABULARY
    )


def data(**options: Any) -> WLBDataModule:
    return WLBDataModule(
        store(0),
        context_window=WINDOW,
        micro_batches=2,
        num_workers=0,  # the ranks are daemons
        validation_documents=store(3),
        **options,
    )


class Evaluations(Recorder):
    """Also the plans of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[str] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *rest) -> None:
        self.evaluated.append(batch.plan.to_json())


def run(strategy: Any, devices: int, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Evaluation, training, evaluation; with a checkpoint of the end where a folder is given."""
    recorder = Evaluations()
    # The monitor needs a strategy that runs plans.
    watched = folder is not None
    monitor = ImbalanceMonitor(heat_map=str(folder and folder / "map.png"), warm_up_steps=0)
    runner = trainer(
        strategy,
        devices,
        callbacks=[recorder, *([monitor] if watched else [])],
        max_steps=STEPS,
        num_sanity_val_steps=0,
    )
    model, documents = module(CASE), data(**options)
    before = runner.validate(model, documents, verbose=False)[0]["val_loss"]
    runner.fit(model, documents)
    after = runner.validate(model, documents, verbose=False)[0]["val_loss"]
    if folder is not None:
        runner.save_checkpoint(folder / "end.ckpt")
    return recorder.record() | {
        "evaluated": recorder.evaluated,
        "validations": [before, after],
        "summary": monitor.summary() if watched else {},
    }


def resume(mesh: tuple[int, ...], path: Path | None, **options: Any) -> dict[str, Any]:
    """From a checkpoint of STEPS steps, or of all of them without one."""
    recorder = Recorder()
    strategy = WLBStrategy(*mesh) if path else "auto"
    runner = trainer(
        strategy,
        int(np.prod(mesh)),
        callbacks=[recorder],
        max_steps=STEPS + 2,
        max_epochs=-1,
        limit_val_batches=0,
    )
    runner.fit(module(CASE), data(**options), ckpt_path=path)
    return recorder.record()


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    results = {
        name: run(WLBStrategy(*mesh, schedule=schedule), 2, folder / name)
        for name, (mesh, schedule) in RUNS.items()
    }
    # Saved with a pipeline, resumed with replicas.
    path = folder / "pipeline" / "end.ckpt"
    results["resumed"] = resume((2, 1, 1, 1), path)
    with pytest.raises(ValueError, match="packing='auto' in the saved state, 'wlb' here"):
        resume((2, 1, 1, 1), path, packing="wlb")
    with pytest.raises(ValueError, match=r"schedule='gpipe' does not run.* keeps pieces whole"):
        run(WLBStrategy(1, 2, schedule="gpipe"), 2, packing="slim")
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("default")
    return run_ranks(on_two_ranks, 2, folder, process_group=False), folder


@cache
def one_process() -> dict[str, Any]:
    return run("auto", 1)


def plans_of(record: dict[str, Any]) -> list[StepPlan]:
    return [StepPlan.from_json(text) for text in (*record["plans"], *record["evaluated"])]


def is_sliced(plan: StepPlan) -> bool:
    return any(part.context for replica in plan.replicas for part in replica.slices)


def loads_of(plan: StepPlan) -> list[float]:
    """FLOPs of each replica, of a shared micro-batch its own part."""
    work = Work.of(config(CASE.tied).shape)
    return [
        sum(
            work.total(part.tokens, part.context) / len(each.replicas)
            for each in replica.forward
            for part in replica.slices_of(each)
        )
        for replica in plan.replicas
    ]


def is_shared(plan: StepPlan) -> bool:
    return any(len(each.replicas) > 1 for each in plan.replicas[0].forward)


@pytest.mark.parametrize("name", RUNS)
def test_training_and_evaluation_equal_one_process(results, name):
    want = one_process()
    for rank in results[0]:
        got = rank[name]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-10)
        assert got["validations"] == pytest.approx(want["validations"], rel=1e-10)
        for mine, other in zip(plans_of(got), plans_of(want), strict=True):
            assert mine.pieces == other.pieces, "what enters a step does not depend on the mesh"
        assert got["parameters"]
        for parameter, value in got["parameters"].items():
            assert relative_error(value, want["parameters"][parameter]) <= 1e-10, parameter


def test_evaluation_does_not_depend_on_the_packing():
    other = run("auto", 1, packing="wlb")
    assert other["validations"][0] == pytest.approx(one_process()["validations"][0], rel=1e-12)


def test_plans_are_those_that_the_mesh_can_run(results):
    """Slices in a pipeline, shared documents over replicas, neither where it cannot run."""
    found = {
        name: (
            any(map(is_sliced, map(StepPlan.from_json, record["plans"]))),
            any(map(is_sliced, map(StepPlan.from_json, record["evaluated"]))),
            any(map(is_shared, map(StepPlan.from_json, record["plans"]))),
            any(map(is_shared, map(StepPlan.from_json, record["evaluated"]))),
        )
        for name, record in results[0][0].items()
        if name in RUNS
    }
    assert found["pipeline"] == (True, True, False, False)
    assert found["gpipe"] == (False,) * 4
    assert found["data"][2:] == (True, True)
    # GPipe, too, gets more micro-batches than N, to fill its pipeline.
    assert max(results[0][0]["gpipe"]["micro_batches"]) > 2


def test_a_checkpoint_goes_on_on_another_mesh(results):
    want = resume((1, 1, 1, 1), None)
    for rank in results[0]:
        got = rank["resumed"]
        assert got["losses"] == pytest.approx(want["losses"][STEPS:], rel=1e-10)
        for text, other in zip(got["plans"], want["plans"][STEPS:], strict=True):
            assert StepPlan.from_json(text).pieces == StepPlan.from_json(other).pieces
        for name, value in got["parameters"].items():
            assert relative_error(value, want["parameters"][name]) <= 1e-10, name


def test_the_monitor_counts_what_ran(results):
    ranks, folder = results
    for name in RUNS:
        summary = ranks[0][name]["summary"]
        assert summary == pytest.approx(ranks[1][name]["summary"], rel=0, abs=0, nan_ok=True)
        assert summary["steps"] == STEPS
        assert summary["delay_max"] == 0
        for level in ("pipeline", "data", "context"):
            assert summary[f"imbalance_{level}_mean"] >= 1
        assert (folder / name / "map.png").exists()
        plans = map(StepPlan.from_json, ranks[0][name]["plans"])
        degrees = [max(each) / np.mean(each) for each in map(loads_of, plans)]
        planned = summary["imbalance_data_planned_mean"]
        assert planned == pytest.approx(np.mean(degrees), rel=1e-12)
