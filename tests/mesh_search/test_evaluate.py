"""The first steps of a run on one mesh, and what their time is spent on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_wlb.cost.profile import Link
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import (
    IDLE,
    LOSSES,
    Evaluation,
    LeftOut,
    MeshChoice,
    MeshRow,
    evaluate,
    name_of,
)
from lightning_wlb.planning.mixture import StoreShare
from lightning_wlb.planning.planner import plan_steps
from tests.mesh_search.requests import request

PIPELINE = Mesh(2, 2)


def test_the_steps_are_those_of_the_run() -> None:
    asked = request()
    made = evaluate(asked, PIPELINE)
    row = made.row
    assert made.fits
    assert row.steps == len(made.steps) == 2
    assert row.steps_ns == sum(step.total_ns for step in made.steps)
    assert row.peak_bytes == max(step.peak_bytes for step in made.steps)
    assert row.tokens == evaluate(asked, Mesh(1, 1, 2, 2)).row.tokens
    predictor = asked.predictor(PIPELINE)
    by_work = plan_steps(asked.planner(predictor, None), 2)
    assert row.steps_ns <= sum(predictor.predict(plan).total_ns for plan in by_work)
    # What enters a step is not the mesh's, nor the plan's.
    assert [plan.pieces for plan in by_work] == [step.plan.pieces for step in made.steps]


@pytest.mark.parametrize(
    ("mesh", "loss"),
    [
        (Mesh(1, 4), IDLE),
        (Mesh(4), "gathering parameters"),
        (Mesh(1, 1, 1, 4), "tensor-parallel communication"),
        (Mesh(1, 1, 4), "exchange of keys"),
    ],
)
def test_what_a_mesh_loses_by_is_named(mesh: Mesh, loss: str) -> None:
    asked = request()
    if mesh.context > 1:  # each micro-batch one document, on all ranks; more keys than parameters
        asked = request(lengths=[4096] * 200, micro_batches=64, packing="best_fit")
    # A link so slow that whatever waits for it is most of the step.
    slow = {"node": Link(0, 1e9), "network": Link(0, 1e9)}
    if loss != IDLE:
        asked = replace(asked, profile=replace(asked.profile, links=slow))
    row = evaluate(asked, mesh).row
    assert set(row.shares) == set(LOSSES)
    assert row.bound_by == loss
    assert 0 < sum(row.shares.values()) < 1
    assert all(share >= -1e-6 for share in row.shares.values())


def test_recomputation_is_what_memory_asks_for() -> None:
    asked = request(devices=1, micro_batches=2, lengths=[4096] * 12)
    plenty = evaluate(asked, Mesh())
    assert plenty.row.recomputed == 0
    percent = 100 * (plenty.row.peak_bytes - 1) // 92
    tight = replace(asked, profile=replace(asked.profile, memory_bytes=percent))
    full = evaluate(replace(asked, activation_checkpointing="full"), Mesh())
    assert full.row.recomputed == 1
    assert full.row.peak_bytes < plenty.row.peak_bytes
    assert full.row.shares["recomputation"] > 0
    made = evaluate(tight, Mesh())
    assert made.fits
    assert plenty.row.steps_ns < made.row.steps_ns < full.row.steps_ns


def test_a_mixture_takes_its_shares() -> None:
    shares = (StoreShare("first", 30, 1.0), StoreShare("second", 30, 3.0))
    plain, mixed = (evaluate(request(mixture=each), PIPELINE) for each in ((), shares))

    def of_second(made: Evaluation) -> float:
        pieces = [piece for step in made.steps for piece in step.plan.pieces]
        tokens = sum(piece.tokens for piece in pieces if piece.document % 60 >= 30)
        return tokens / sum(piece.tokens for piece in pieces)

    assert of_second(mixed) == pytest.approx(0.75, abs=0.1)
    assert of_second(plain) < 0.65


@pytest.mark.parametrize("mesh", [Mesh(4), Mesh(2, 2), Mesh(1, 4), Mesh(2, 1, 2)], ids=str)
def test_a_sample_of_even_documents_is_as_fast_as_the_step(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(lengths=[4096] * 40, micro_batches=16, packing="best_fit", steps=1)
    whole = evaluate(asked, mesh)
    expected = 1000 * whole.steps_ns // whole.row.tokens
    for sampled, part in ((16, False), (4, mesh.data > 1)):
        monkeypatch.setattr("lightning_wlb.mesh_search.evaluate.SAMPLED", sampled)
        made = Evaluation(asked, mesh)
        # A part has fewer replicas, and gathers and reduces as the whole.
        made.go_on(0)
        assert (made.ps, made.fits) == (expected, True)
        assert bool(made.steps) != part
    small = replace(asked, profile=replace(asked.profile, memory_bytes=10**9))
    made = Evaluation(small, mesh)
    made.go_on(0)
    assert not made.fits


def row(mesh: Mesh, time: int) -> MeshRow:
    shares = {IDLE: 0.1, "exchange of keys": 0.2}
    return MeshRow(mesh, "1f1b", "auto", 0.25, time, 2, 8000, 10**15, 70, shares)


CHOICE = MeshChoice(
    (row(Mesh(2, 2), 4_000_000), row(Mesh(1, 2, 2, virtual_stages=2), 5_000_000)),
    (LeftOut("too slow", 3, "1,1,4,1"),),
)


def test_figures_of_a_row() -> None:
    best = CHOICE.best
    assert best.step_ms == 2.0
    assert best.tokens_per_second == 2_000_000
    assert best.idle == 0.1
    assert CHOICE.rows[1].times(best) == 1.25
    assert best.bound_by == "exchange of keys"
    assert name_of(best.mesh) == "2,2,1,1"
    assert best.figures["mesh"] == vars(Mesh(2, 2))
    assert best.figures["tokens_per_second"] == 2_000_000


def test_a_name_has_virtual_stages_where_there_are_any() -> None:
    assert name_of(Mesh(2, 2)) == "2,2,1,1"
    assert name_of(Mesh(2, 2, virtual_stages=2)) == "2,2,1,1 with 2 virtual stages"
