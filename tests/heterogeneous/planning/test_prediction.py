"""Predicted steps on pipelines of their own: what the pool chose by, and figures by ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_wlb.callbacks.imbalance import predicted_imbalance
from lightning_wlb.heterogeneous.planning.dealing import PipelineKind
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.plan import Scheme
from tests.heterogeneous.planning.test_pool import ALONE, DATA, base, planner
from tests.prediction.test_predictor import H100, predictor
from tests.prediction.test_predictor import plan_of as whole_documents

MIXED = (Scheme(0, (2, 2)), Scheme(2, (4,)), Scheme(3, (4,)))


def test_a_step_takes_what_the_pool_has_chosen_it_by() -> None:
    own = planner(MIXED, ALONE)
    pool = Pool.of([MIXED, ALONE], base())
    pieces = own.next_step().pieces
    for made in pool.arranged(pieces, own.rules, DATA.packer):
        plan = replace(own.next_step(), schemes=made.schemes, replicas=made.replicas, pieces=pieces)
        step = pool.predict(plan, base())
        assert step.total_ns == made.time_ns
        assert step.devices == 4
        assert len(step.simulations) == len(made.schemes)
        # Nothing waits for another context rank; a stage's idle time is that of its ranks.
        assert predicted_imbalance(step).context.degree == pytest.approx(1.0)
        busy = sum(sum(each.busy_ns) for each in step.simulations)
        assert busy == step.work_ns.sum()
        latest = max(step.simulations, key=lambda each: each.total_ns)
        assert step.total_ns == latest.total_ns


def test_pipelines_that_share_a_micro_batch_wait_for_each_other_and_no_others() -> None:
    """The second and the fourth of four pipelines share their first micro-batch."""
    plan = whole_documents([[[500]], [[4000], [9000]], [[30000]], [[4000]]])
    alone = predictor(replace(base().latency.mesh, data=4, tensor=1), profile=H100)
    strategy = tuple(Scheme(rank, (8,)) for rank in range(4))
    plan = replace(plan, schemes=strategy)
    pool = Pool({strategy: {strategy[0].shape: PipelineKind(strategy[0], alone, count=4)}})
    apart = pool.predict(plan, alone)
    replicas = list(plan.replicas)
    for number in (1, 3):
        first, *rest = replicas[number].forward
        forward = (replace(first, replicas=(1, 3)), *rest)
        replicas[number] = replace(replicas[number], forward=forward, backward=forward)
    shared = replace(plan, replicas=tuple(replicas))
    met = pool.predict(shared, alone)
    for number in (0, 2):
        assert met.simulations[number].spans == apart.simulations[number].spans
    spans = [met.simulations[number].spans[0] for number in (1, 3)]
    assert spans[0][0] == spans[1][0]
    assert spans[0][0] != apart.simulations[1].spans[0][0]
