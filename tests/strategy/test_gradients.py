"""Promise 1: gradients and parameters do not depend on mesh, packing order, sharding, schedule."""

from functools import cache

import numpy as np
import pytest

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
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

# Mesh -> which cases. What a sharding does shows where a context-parallel group is, alone and with
# each other axis; what the rest of a case does shows on every axis.
MESHES: dict[tuple[int, int, int, int], tuple[int, ...]] = {
    (1, 1, 1, 1): (0, 2, 3),
    (2, 1, 1, 1): (0, 1, 3),
    (1, 2, 1, 1): (0, 1, 2, 3),
    (1, 4, 1, 1): (0, 1, 3),
    (1, 1, 2, 1): (0, 1, 2, 3, 4, 5),
    (1, 1, 4, 1): (1, 2, 3, 5),
    (1, 1, 8, 1): (0, 3),  # most documents are shorter than 16 chunks
    (1, 1, 1, 2): (0, 2, 3),
    (2, 2, 1, 1): (1, 2),
    (1, 2, 2, 1): (2, 3),
    (2, 1, 2, 1): (1, 5),
    (1, 2, 1, 2): (1, 2, 3),
    (1, 1, 2, 2): (0, 4),
    (2, 2, 2, 1): (0, 4),
    (1, 2, 2, 2): (1, 5),
    (2, 1, 2, 2): (2, 3),
}
TOLERANCE = 1e-10


@cache
def expected(case: Case) -> dict:
    return reference(case)


def run_cases(rank: int, mesh: tuple[int, int, int, int], cases: tuple[Case, ...]) -> list[dict]:
    results = []
    for case in cases:
        recorder = Recorder()
        strategy = WLBStrategy(*mesh)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        runner.fit(module(case), data(case))
        results.append(recorder.record())
    return results


def run_schedules(
    rank: int, runs: tuple[tuple[tuple[int, ...], str, int, Case], ...]
) -> list[dict]:
    results = []
    for mesh, schedule, virtual, case in runs:
        recorder = Recorder()
        strategy = WLBStrategy(*mesh, schedule=schedule, virtual_pipeline_size=virtual)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        runner.fit(module(case), data(case))
        results.append(recorder.record())
    return results


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (1, (((1, 1, 1, 1), "interleaved", 4, CASES[0]),)),
        (
            2,
            (
                ((1, 2, 1, 1), "gpipe", 1, CASES[0]),
                ((1, 2, 1, 1), "interleaved", 2, CASES[1]),
                ((1, 2, 1, 1), "interleaved", 2, CASES[2]),
            ),
        ),
        (
            4,
            (
                ((1, 4, 1, 1), "gpipe", 1, CASES[1]),
                ((2, 2, 1, 1), "interleaved", 2, CASES[0]),
                ((1, 2, 2, 1), "interleaved", 2, CASES[2]),
                ((1, 2, 1, 2), "interleaved", 2, CASES[1]),
            ),
        ),
    ],
)
def test_every_schedule_gives_the_same_gradients(ranks, runs):
    results = run_ranks(run_schedules, ranks, runs, process_group=False)
    for index, (_, _, _, case) in enumerate(runs):
        check_equal([rank[index] for rank in results], case)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_gradients_and_parameters_equal_one_process(mesh):
    cases = tuple(on_mesh(CASES[index], mesh) for index in MESHES[mesh])
    ranks = run_ranks(run_cases, int(np.prod(mesh)), mesh, cases, process_group=False)
    for index, case in enumerate(cases):
        check_equal([rank[index] for rank in ranks], case)
    if mesh[0] == 2:
        # Replicas with different numbers of micro-batches are part of what was tested.
        counts = {tuple(record["micro_batches"]) for rank in ranks for record in rank[:1]}
        assert len(counts) > 1


def test_the_meshes_and_cases_meet():
    """Every sharding with context and each other axis; every other trait with every axis."""

    def values(trait: str, *axes: int) -> set[str]:
        return {
            getattr(CASES[index], trait)
            for mesh, cases in MESHES.items()
            for index in cases
            if all(mesh[axis] > 1 for axis in axes)
        }

    data, pipeline, context, tensor = range(4)
    for axis in (data, pipeline, context, tensor):
        assert values("sharding", context, axis) == {each.sharding for each in CASES}, axis
        for trait in ("packing", "tied", "masked", "activation_checkpointing", "sliding_window"):
            assert values(trait, axis) == {getattr(each, trait) for each in CASES}, (axis, trait)


BY_HEADS = (
    Case("wlb", "heads", tied=True, activation_checkpointing="full", masked=True),
    Case("slim", "heads"),  # slices exchange keys, also under this sharding
)


@pytest.mark.parametrize("mesh", [(1, 1, 2, 2), (1, 2, 2, 1)], ids=str)
def test_attention_split_by_heads_gives_the_same_gradients(mesh):
    cases = tuple(on_mesh(case, mesh) for case in BY_HEADS)
    ranks = run_ranks(run_cases, int(np.prod(mesh)), mesh, cases, process_group=False)
    for index, case in enumerate(cases):
        check_equal([rank[index] for rank in ranks], case)


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
