"""Promise 1 for plans that slice pieces over micro-batches, regroup them, or merge replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.changed_plans import changed_data
from tests.strategy.harness import CASES, Recorder, module, on_mesh, trainer
from tests.strategy.test_gradients import check_equal

ONE, DP, PP, CP, TP = (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)

# (change, mesh, schedule, case); cases 1 and 2 tie the embeddings. Plans mix what they recompute.
RUNS: dict[str, tuple[tuple[str, tuple[int, ...], str, int], ...]] = {
    # One rank runs any legal plan in test_random_plans.py; here with FSDP and the Trainer.
    "1 rank": (
        ("sliced", ONE, "1f1b", 3),
        ("asymmetric", ONE, "1f1b", 2),
    ),
    "sliced, 2 ranks": (
        ("sliced", DP, "1f1b", 0),
        ("sliced", PP, "1f1b", 1),
        ("sliced", PP, "interleaved", 0),
        ("sliced", CP, "1f1b", 2),
        ("sliced", CP, "1f1b", 3),
        ("sliced", TP, "1f1b", 0),
    ),
    "sliced, 4 ranks": (
        ("sliced", (1, 4, 1, 1), "1f1b", 0),
        ("sliced", (1, 1, 4, 1), "1f1b", 5),
        ("sliced", (2, 1, 2, 1), "1f1b", 4),
        ("sliced", (1, 2, 1, 2), "1f1b", 2),
        ("sliced", (1, 1, 2, 2), "1f1b", 5),
        ("sliced", (1, 2, 2, 1), "interleaved", 3),
    ),
    "asymmetric, 2 ranks": (
        ("asymmetric", DP, "1f1b", 3),
        ("asymmetric", PP, "1f1b", 1),
        ("asymmetric", PP, "interleaved", 2),
        ("asymmetric", CP, "1f1b", 4),
        ("asymmetric", TP, "1f1b", 5),
    ),
    "asymmetric, 4 ranks": (
        ("asymmetric", (1, 4, 1, 1), "1f1b", 2),
        ("asymmetric", (1, 2, 2, 1), "1f1b", 0),
    ),
    "merged, 2 ranks": (
        ("merged", DP, "1f1b", 0),
        ("merged", DP, "1f1b", 2),
        ("sliced and merged", DP, "1f1b", 0),
        ("sliced and merged", DP, "1f1b", 3),
        ("asymmetric and merged", DP, "1f1b", 4),
    ),
    # In every other step all four replicas share one micro-batch, else two and two.
    "merged, 4 ranks": (
        ("merged", (4, 1, 1, 1), "1f1b", 0),
        ("merged", (2, 1, 2, 1), "1f1b", 3),
        ("merged", (2, 2, 1, 1), "1f1b", 2),
        ("merged", (2, 1, 1, 2), "1f1b", 5),
    ),
    "merged and sliced, 4 ranks": (
        ("sliced and merged", (4, 1, 1, 1), "1f1b", 1),
        ("sliced and merged", (2, 2, 1, 1), "1f1b", 2),
        ("sliced and merged", (2, 1, 2, 1), "1f1b", 4),
        ("asymmetric and merged", (2, 2, 1, 1), "1f1b", 0),
    ),
    # In the second step the pipelines of all four replicas share one micro-batch, else two and two.
    "merged, 8 ranks": (("merged", (4, 2, 1, 1), "1f1b", 1),),
}


def run_changed(rank: int, runs: tuple[tuple[Any, ...], ...]) -> list[dict]:
    results = []
    for change, mesh, schedule, number in runs:
        case = on_mesh(CASES[number], mesh)
        recorder = Recorder()
        strategy = WLBStrategy(*mesh, schedule=schedule)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        free = replace(case, activation_checkpointing="auto")  # plans say what is recomputed
        runner.fit(module(free), changed_data(case, change))
        results.append(recorder.record())
    return results


def test_one_process_without_an_executor():
    recorder = Recorder()
    trainer("auto", 1, callbacks=[recorder]).fit(module(CASES[0]), changed_data(CASES[0], "sliced"))
    check_equal([recorder.record()], CASES[0])


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_changed_plans_give_the_gradients_of_one_process(runs):
    ranks = int(np.prod(runs[0][1]))
    results = run_ranks(run_changed, ranks, runs, process_group=False, timeout=240)
    for index, (_, mesh, _, number) in enumerate(runs):
        check_equal([rank[index] for rank in results], on_mesh(CASES[number], mesh))
