"""The totals of a step are those of its simulation, to the nanosecond and the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dp_merge import Dealing, slice_shared
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import slice_pieces
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.step_totals import ReplicaTotals, StepTotals, has_totals
from tests.prediction.test_predictor import SHAPE, predictor


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=12),
    packs=st.integers(1, 9),
    sizes=st.tuples(*(st.sampled_from(each) for each in ((1, 2, 4), (1, 2, 3, 4), (1, 2), (1, 2)))),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=5),
)
def test_totals_are_those_of_the_simulation(lengths, packs, sizes, modes):
    mesh = Mesh(*sizes)
    work = Work.of(SHAPE).total
    pieces = [Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths)]
    merged = Dealing(pieces, mesh.data, work, per_capacity=2).merged
    shared = slice_shared(merged, packs, 4096, work)
    replicas = [
        replica_plan(
            slice_pieces(own, packs, 4096, work, tile=8, least=16),
            number,
            "per_document_contiguous",
            shared,
        )
        for number, own in enumerate(merged.own)
    ]
    model = predictor(mesh)
    exact = list(map(model.costs, replicas))
    costs = [
        [
            cost._replace(recompute=modes[at % len(modes)] if at >= shared_here else "full")
            for at, cost in enumerate(of_replica)
        ]
        for of_replica, shared_here in zip(
            exact,
            (sum(len(each.replicas) > 1 for each in replica.forward) for replica in replicas),
            strict=True,
        )
    ]
    step = model.run(replicas, costs)
    totals = StepTotals(model, list(map(partial(ReplicaTotals, model), replicas, costs)))
    times = totals.times
    assert times.total_ns == step.simulations[0].total_ns
    assert max(times.ends_ns) == step.simulations[0].compute_ns
    assert totals.peak == step.peak_bytes


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("interleaved", 2), ("interleaved", 1)])
def test_other_schedules_are_simulated(schedule, virtual_stages):
    mesh = Mesh(pipeline=2, virtual_stages=virtual_stages)
    assert not has_totals(predictor(mesh, schedule=schedule))
    assert has_totals(replace(predictor(Mesh(pipeline=2)), schedule="1f1b"))
