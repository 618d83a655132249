"""Promise 1: gradients and parameters do not depend on mesh, packing order, sharding, schedule.

Nor on how a plan slices pieces over micro-batches, merges replicas, and what it recomputes.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from lightning_wlb.strategy import run_planning
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.changed_plans import changed_data
from tests.strategy.harness import (
    CASES,
    Case,
    Recorder,
    data,
    module,
    on_mesh,
    reference,
    relative_error,
    trainer,
)


class Run(NamedTuple):
    """One run of three steps, whose plans are changed where a change is named."""

    mesh: tuple[int, int, int, int]
    case: Case
    schedule: str = "auto"
    virtual: int | None = None
    change: str | None = None

    def __str__(self) -> str:
        schedule = "" if self.schedule == "auto" else f"-{self.schedule}"
        how = f"{self.change or self.case.packing}-{self.case.sharding}"
        return f"{'x'.join(map(str, self.mesh))}{schedule}-{how}"


ONE, DP, PP, CP, TP = (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)


def changed(change: str, mesh: tuple[int, ...], number: int, schedule: str = "1f1b") -> Run:
    """A run with changed plans, which mix what they recompute. Cases 1 and 2 tie embeddings."""
    return Run(mesh, on_mesh(CASES[number], mesh, schedule), schedule, change=change)


# Mesh -> which cases. What a sharding does shows where a context-parallel group is; what the rest
# of a case does shows on every axis. All axes meet in the last mesh, and by twos in the runs below.
MESHES: dict[tuple[int, int, int, int], tuple[int, ...]] = {
    (1, 1, 1, 1): (0,),
    (2, 1, 1, 1): (0, 1, 3),
    (1, 2, 1, 1): (1, 2, 3),
    (1, 1, 2, 1): (0, 1, 2, 3, 4, 5),
    (1, 1, 4, 1): (3,),
    (1, 1, 1, 2): (0, 2, 3),
    (2, 2, 1, 1): (2,),
    (2, 2, 2, 2): (4,),
}
RUNS = (
    *(Run(mesh, on_mesh(CASES[each], mesh)) for mesh, cases in MESHES.items() for each in cases),
    Run((1, 2, 2, 1), Case("slim", "hybrid")),
    Run((1, 1, 1, 1), CASES[0], "interleaved", 4),
    Run((1, 2, 1, 1), CASES[1], "interleaved", 2),
    Run((2, 2, 1, 1), CASES[0], "interleaved", 2),
    Run((1, 2, 2, 1), CASES[2], "interleaved", 2),
    Run((1, 2, 1, 2), CASES[1], "interleaved", 2),
    # One rank runs any legal plan in test_random_plans.py; here with FSDP and the Trainer.
    changed("sliced", ONE, 2),
    changed("sliced", DP, 0),
    changed("sliced", PP, 1),
    changed("sliced", PP, 0, "interleaved"),
    changed("sliced", CP, 3),
    changed("sliced", TP, 0),
    changed("merged", DP, 2),
    changed("sliced and merged", DP, 3),
    changed("sliced", (1, 1, 2, 2), 5),
    changed("sliced", (1, 2, 2, 1), 3, "interleaved"),
    changed("sliced", (1, 4, 1, 1), 2),
    # In every other step all four replicas share one micro-batch, else two and two.
    changed("merged", (2, 1, 1, 2), 5),
    changed("sliced and merged", (4, 1, 1, 1), 1),
    changed("sliced and merged", (2, 1, 2, 1), 4),
    changed("sliced and merged", (2, 2, 1, 1), 0),
)
# Every sharding on two and on three axes together, and the longest rings of keys.
LONG = {
    (1, 4, 1, 1): (0,),
    (2, 2, 1, 1): (1,),
    (2, 1, 1, 2): (3,),
    (1, 2, 1, 2): (1, 2),
    (1, 2, 2, 1): (2, 3),
    (2, 1, 2, 1): (1, 5),
    (1, 1, 2, 2): (0, 4),
    (1, 1, 4, 1): (1, 2, 5),
    (1, 1, 8, 1): (0, 3),  # most documents are shorter than 16 chunks
    (2, 2, 2, 1): (0, 4),
    (1, 2, 2, 2): (1, 5),
    (2, 1, 2, 2): (2, 3),
}
SOAK = (
    *(Run(mesh, on_mesh(CASES[each], mesh)) for mesh in LONG for each in LONG[mesh]),
    changed("sliced", CP, 2),
    changed("merged", (4, 1, 1, 1), 0),
    changed("sliced", (1, 1, 4, 1), 5),
    changed("sliced", (2, 1, 2, 1), 4),
    changed("sliced", (1, 2, 1, 2), 2),
    changed("merged", (2, 1, 2, 1), 3),
    changed("merged", (2, 2, 1, 1), 2),
    # In the second step the pipelines of all four replicas share one micro-batch, else two and two.
    changed("merged", (4, 2, 1, 1), 1),
)
TOLERANCE = 1e-10


@cache
def expected(case: Case) -> dict:
    return reference(case)


def run_all(rank: int, runs: tuple[Run, ...]) -> list[dict]:
    results = []
    for mesh, case, schedule, virtual, change in runs:
        recorder = Recorder()
        strategy = WLBStrategy(*mesh, schedule=schedule, virtual_pipeline_size=virtual)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        # Rows between tensor-parallel ranks travel in parts, few as they are.
        with mock.patch.object(run_planning, "default_chunks", return_value=3):
            if change is None:
                runner.fit(module(case), data(case))
            else:  # plans say what is recomputed
                free = replace(case, activation_checkpointing="auto")
                runner.fit(module(free), changed_data(case, change))
        results.append(recorder.record())
    return results


@cache
def records(ranks: int, of: tuple[Run, ...]) -> dict[Run, list[dict]]:
    """What each rank has recorded of all runs on so many ranks, which are started once."""
    runs = tuple(run for run in of if np.prod(run.mesh) == ranks)
    each = run_ranks(run_all, ranks, runs, process_group=False, timeout=240)
    return {run: [record[index] for record in each] for index, run in enumerate(runs)}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_gradients_and_parameters_equal_one_process(run):
    found = records(int(np.prod(run.mesh)), RUNS)[run]
    check_equal(found, run.case)
    if run.mesh[0] == 2 and run.case.packing == "wlb" and run.change is None:
        # Replicas with different numbers of micro-batches are part of what was tested.
        assert len({tuple(record["micro_batches"]) for record in found}) > 1


@pytest.mark.soak
@pytest.mark.parametrize("run", SOAK, ids=str)
def test_gradients_and_parameters_equal_one_process_on_more_meshes(run):
    check_equal(records(int(np.prod(run.mesh)), SOAK)[run], run.case)


def test_changed_plans_of_one_process_without_an_executor():
    recorder = Recorder()
    trainer("auto", 1, callbacks=[recorder]).fit(module(CASES[0]), changed_data(CASES[0], "sliced"))
    check_equal([recorder.record()], CASES[0])


def test_the_meshes_and_cases_meet():
    """Every sharding with context, and in the long runs with each other axis; each pair of axes."""

    def values(trait: str, runs: tuple[Run, ...], *axes: int) -> set[str]:
        plain = (run for run in runs if run.change is None)
        met = [run.case for run in plain if all(run.mesh[axis] > 1 for axis in axes)]
        return {getattr(case, trait) for case in met}

    context = 2
    shardings = {each.sharding for each in CASES}
    assert shardings <= values("sharding", RUNS, context)
    for axis in range(4):
        assert shardings <= values("sharding", (*RUNS, *SOAK), context, axis), axis
        for other in range(4):
            assert values("sharding", RUNS, axis, other), (axis, other)
        for trait in ("packing", "tied", "masked", "activation_checkpointing", "sliding_window"):
            wanted = {getattr(each, trait) for each in CASES}
            assert wanted <= values(trait, RUNS, axis), (axis, trait)


def check_equal(records: list[dict], case: Case) -> None:
    """All ranks' losses, gradients of three steps and final parameters against one process."""
    want = expected(case)
    seen: set[str] = set()
    for record in records:
        assert record["losses"] == pytest.approx(want["losses"], rel=1e-12)
        assert len(record["gradients"]) == 3
        for step in range(3):
            for name, gradient in record["gradients"][step].items():
                name = _global(name, want["gradients"][step])
                seen.add(name)
                error = relative_error(gradient, want["gradients"][step][name])
                assert error <= TOLERANCE, (case, step, name, error)
        for name, value in record["parameters"].items():
            name = _global(name, want["parameters"])
            error = relative_error(value, want["parameters"][name])
            assert error <= TOLERANCE, (case, name, error)
    assert seen == set(want["gradients"][0]), case


def _global(name: str, names: dict) -> str:
    """A tied head on a stage of its own equals the embedding of one process."""
    return name if name in names else name.replace("head.weight", "embed.weight")
