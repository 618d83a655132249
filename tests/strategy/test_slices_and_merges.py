"""Promise 1 for plans that slice pieces over micro-batches, or merge replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.changed_plans import changed_data
from tests.strategy.harness import CASES, Recorder, module, on_mesh, trainer
from tests.strategy.test_gradients import check_equal

ONE, DP, PP, CP, TP = (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)


class Run(NamedTuple):
    """A run whose plans are changed. Cases 1 and 2 tie the embeddings."""

    change: str
    mesh: tuple[int, int, int, int]
    number: int
    schedule: str = "1f1b"

    def __str__(self) -> str:
        return f"{self.change}-{'x'.join(map(str, self.mesh))}-{self.schedule}-{self.number}"


# Plans mix what they recompute.
RUNS = (
    # One rank runs any legal plan in test_random_plans.py; here with FSDP and the Trainer.
    Run("sliced", ONE, 2),
    Run("sliced", DP, 0),
    Run("sliced", PP, 1),
    Run("sliced", PP, 0, "interleaved"),
    Run("sliced", CP, 3),
    Run("sliced", TP, 0),
    Run("merged", DP, 2),
    Run("sliced and merged", DP, 3),
    Run("sliced", (1, 1, 2, 2), 5),
    Run("sliced", (1, 2, 2, 1), 3, "interleaved"),
    Run("sliced", (1, 4, 1, 1), 2),
    # In every other step all four replicas share one micro-batch, else two and two.
    Run("merged", (2, 1, 1, 2), 5),
    Run("sliced and merged", (4, 1, 1, 1), 1),
    Run("sliced and merged", (2, 1, 2, 1), 4),
    Run("sliced and merged", (2, 2, 1, 1), 0),
)
SOAK = (
    Run("sliced", CP, 2),
    Run("merged", (4, 1, 1, 1), 0),
    Run("sliced", (1, 1, 4, 1), 5),
    Run("sliced", (2, 1, 2, 1), 4),
    Run("sliced", (1, 2, 1, 2), 2),
    Run("merged", (2, 1, 2, 1), 3),
    Run("merged", (2, 2, 1, 1), 2),
    # In the second step the pipelines of all four replicas share one micro-batch, else two and two.
    Run("merged", (4, 2, 1, 1), 1),
)


def run_changed(rank: int, runs: tuple[Run, ...]) -> list[dict]:
    results = []
    for change, mesh, number, schedule in runs:
        case = on_mesh(CASES[number], mesh, schedule)
        recorder = Recorder()
        strategy = WLBStrategy(*mesh, schedule=schedule)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        free = replace(case, activation_checkpointing="auto")  # plans say what is recomputed
        runner.fit(module(free), changed_data(case, change))
        results.append(recorder.record())
    return results


@cache
def records(ranks: int, of: tuple[Run, ...]) -> dict[Run, list[dict]]:
    """What each rank has recorded of all runs on so many ranks, which are started once."""
    runs = tuple(run for run in of if np.prod(run.mesh) == ranks)
    each = run_ranks(run_changed, ranks, runs, process_group=False, timeout=240)
    return {run: [record[index] for record in each] for index, run in enumerate(runs)}


def test_one_process_without_an_executor():
    recorder = Recorder()
    trainer("auto", 1, callbacks=[recorder]).fit(module(CASES[0]), changed_data(CASES[0], "sliced"))
    check_equal([recorder.record()], CASES[0])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_changed_plans_give_the_gradients_of_one_process(run):
    found = records(int(np.prod(run.mesh)), RUNS)[run]
    check_equal(found, on_mesh(CASES[run.number], run.mesh, run.schedule))


@pytest.mark.soak
@pytest.mark.parametrize("run", SOAK, ids=str)
def test_changed_plans_give_the_gradients_of_one_process_on_more_meshes(run):
    found = records(int(np.prod(run.mesh)), SOAK)[run]
    check_equal(found, on_mesh(CASES[run.number], run.mesh, run.schedule))
