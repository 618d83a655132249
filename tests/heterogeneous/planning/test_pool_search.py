"""Pools of strategies: chosen by some steps, judged by others, and promised as they are planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.heterogeneous.planning import pool_search as dynamic
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import PoolChoice, choose_pool, described
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, Schemes
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import Planner, plan_steps
from tests.mesh_search.requests import request

MIXED = np.where(np.arange(1200) % 200 == 7, 30_000, 300 + 7 * np.arange(1200) % 900)
"""Many short documents, and every now and then a long one."""
SHAPE = ModelShape(2048, 4, 16, 16, 128, 5504, 32_000)
MESH = Mesh(2, tensor=2)


def asked(**changes):
    given = {"shape": SHAPE, "window": 32_768, "micro_batches": 3, "packing": "slim", "steps": 6}
    return request(4, MIXED, **given | changes)


def of(*sizes: int) -> Schemes:
    """Pipelines of one stage on so many tensor-parallel ranks."""
    firsts = np.cumsum([0, *sizes]).tolist()
    return tuple(Scheme(first, (4,), tensor=n) for first, n in zip(firsts, sizes, strict=False))


def test_what_is_promised_is_what_the_planner_plans() -> None:
    profile = Profile.load("h100")
    given = asked(profile=replace(profile, memory_bytes=8 << 30))  # no long document on one device
    choice = choose_pool(given, MESH)
    assert choice.schemes
    assert choice.gain > dynamic.WORTH
    assert len(choice.chosen) > 1  # steps differ in what suits them
    assert all(choice.chosen)
    base = given.predictor(MESH)
    scorer = ProfileScorer(base)

    def plans(pool: Pool | None):
        planner = Planner(
            given.lengths, given.data, Work.of(SHAPE), MESH, scorer=scorer, step_chooser=pool,
            kernel_cost=base.latency.segment_cost,
        )  # fmt: skip
        return plan_steps(planner, 6)[3:], planner

    pool = Pool.of(choice.schemes, base)
    on_mesh, planner = plans(None)
    chosen, _ = plans(pool)
    total = 0
    for plain, plan in zip(on_mesh, chosen, strict=True):
        arranged = pool.arranged(plan.pieces, planner.packer)
        own = {each.schemes: each for each in arranged}
        on, off = scorer(plain.replicas).time, own.get(plan.schemes)
        total += off.time_ns if off else on
        assert plan.schemes or plan.digest == plain.digest
        assert off is None or off.time_ns < on
    assert (choice.steps, choice.pool_ns) == (3, total)
    assert choice.mesh_ns == sum(scorer(plan.replicas).time for plan in on_mesh)
    strategies = [plan.schemes for plan in chosen]
    assert choice.chosen == tuple(map(strategies.count, choice.schemes))
    assert choice == choose_pool(given, MESH)


def test_documents_that_are_alike_stay_on_a_good_mesh() -> None:
    choice = choose_pool(replace(asked(), lengths=np.full(400, 1024)), Mesh(4))
    assert choice.schemes == ()
    assert 1 <= choice.gain <= dynamic.WORTH
    assert choice.lines[0].startswith("Dynamic strategies are not for you: simulated, 3 steps")


def test_a_model_that_fits_nowhere_else_stays() -> None:
    small = replace(Profile.load("h100"), memory_bytes=2_000_000_000)
    assert choose_pool(asked(profile=small), MESH).proposed == 0


CHOICE = PoolChoice(
    (of(2, 1, 1), of(1, 1, 1, 1)),
    (of(2, 1, 1), of(1, 1, 1, 1)),
    7,
    MESH,
    5_000_000,
    4_000_000,
    (1, 2),
    4,
)


def test_the_figure_is_said_either_way() -> None:
    choice = CHOICE
    assert choice.lines == [
        "Dynamic strategies pay: simulated, 4 steps take 5.0 ms on the mesh 2,1,1,2, and 4.0 ms"
        " where each may leave it for the best 2 of 7 other strategies: 25.0% faster.",
        "  1 of 4 steps stay on the mesh.",
        "  1 take 1 × (pipeline 1, context 1, tensor 2) + 2 × (pipeline 1, context 1, tensor 1).",
        "  2 take 4 × (pipeline 1, context 1, tensor 1).",
    ]
    every = replace(choice, chosen=(0, 4))
    assert every.lines[-1] == "  All of them do, so rather take the mesh 4,1,1,1."
    small = replace(choice, schemes=(), pool_ns=4_950_000)
    assert small.lines == [
        "Dynamic strategies are not for you: simulated, 4 steps take 5.0 ms on the mesh 2,1,1,2,"
        " and 5.0 ms where each may leave it for the best 2 of 7 other strategies: 1.0% faster, and"
        " 2% are asked."
    ]
    assert described(of(2, 2)) == "2 × (pipeline 1, context 1, tensor 2)"


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="virtual_stages=2, but pipelines that differ"):
        choose_pool(asked(), Mesh(2, 2, virtual_stages=2))
    with pytest.raises(ValueError, match="Use packing='auto', 'slim' or 'hydraulis'"):
        choose_pool(asked(packing="best_fit"), MESH)
