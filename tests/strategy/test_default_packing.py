"""The default packing in real runs: slices and shared documents, in training and in evaluation.

Documents are long enough to be sliced, so that what the planner makes of its own is what runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.plan import StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import VOCABULARY, Case, Recorder, module, relative_error, trainer

WINDOW = 1300
STEPS, RESUMED = 3, 2
# One document of most of a step's work, then many short ones.
LENGTHS = (1300, 90, 40, 500, 1300, 610, 200, 7, 1, 80, 1200, 350, 60, 1300, 33, 800)
MESHES = {"pipeline": (1, 2, 1, 1), "data": (2, 1, 1, 1)}


def store(seed: int) -> InMemoryDocuments:
    generator = np.random.default_rng(seed)
    lengths = generator.permutation(LENGTHS)
    return InMemoryDocuments(
        [generator.integers(0, VOCABULARY, length) for length in lengths], vocab_size=VOCABULARY
    )


class Evaluations(Recorder):
    """Also the plans of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[str] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *rest) -> None:
        self.evaluated.append(batch.plan.to_json())


def run(
    strategy: Any, devices: int, steps: int, path: Path | None = None, resumed: bool = False
) -> dict[str, Any]:
    """Evaluation and training, which is saved in ``path``, or resumed from there."""
    recorder = Evaluations()
    runner = trainer(
        strategy,
        devices,
        callbacks=[recorder],
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0 if resumed else None,
        num_sanity_val_steps=0,
    )
    model, window = module(Case()), {"context_window": WINDOW, "micro_batches": 2}
    documents = WLBDataModule(store(0), **window, num_workers=0, validation_documents=store(3))
    loss = [] if resumed else runner.validate(model, documents, verbose=False)
    runner.fit(model, documents, ckpt_path=path if resumed else None)
    if path is not None and not resumed:
        runner.save_checkpoint(path)
    return recorder.record() | {"evaluated": recorder.evaluated, "validation": loss}


def on_two_ranks(rank: int, path: Path) -> dict[str, Any]:
    results = {
        name: run(WLBStrategy(*mesh), 2, STEPS, path if name == "pipeline" else None)
        for name, mesh in MESHES.items()
    }
    # Saved with a pipeline, resumed with replicas.
    results["resumed"] = run(WLBStrategy(2), 2, STEPS + RESUMED, path, resumed=True)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("default") / "end.ckpt"
    return run_ranks(on_two_ranks, 2, path, process_group=False)


@cache
def one_process() -> dict[str, Any]:
    return run("auto", 1, STEPS + RESUMED)


def plans_of(record: dict[str, Any], what: str) -> list[StepPlan]:
    return [StepPlan.from_json(text) for text in record[what]]


@pytest.mark.parametrize("name", [*MESHES, "resumed"])
def test_training_and_evaluation_equal_one_process(results, name):
    want = one_process()
    steps = slice(STEPS, None) if name == "resumed" else slice(STEPS)
    for got in (rank[name] for rank in results):
        assert got["losses"] == pytest.approx(want["losses"][steps], rel=1e-10)
        if name != "resumed":
            assert got["validation"] == [pytest.approx(want["validation"][0], rel=1e-10)]
        for mine, other in zip(plans_of(got, "plans"), plans_of(want, "plans")[steps], strict=True):
            assert mine.pieces == other.pieces, "what enters a step does not depend on the mesh"
        assert got["gradients"]
        for mine, other in zip(got["gradients"], want["gradients"][steps], strict=True):
            for parameter, value in mine.items():
                assert relative_error(value, other[parameter]) <= 1e-10, parameter


@pytest.mark.parametrize("what", ["plans", "evaluated"])
def test_plans_are_those_that_the_mesh_can_run(results, what):
    """Slices in a pipeline, and documents that replicas share."""

    def any_part(name: str, is_so: Any) -> bool:
        replicas = (each for plan in plans_of(results[0][name], what) for each in plan.replicas)
        return any(is_so(replica) for replica in replicas)

    def is_shared(replica: Any) -> bool:
        return any(len(each.replicas) > 1 for each in replica.forward)

    assert any_part("pipeline", lambda replica: any(part.context for part in replica.slices))
    assert not any_part("pipeline", is_shared)
    assert any_part("data", is_shared)
