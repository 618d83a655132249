"""Costs that are estimated before a sharding is chosen, against those of the chosen layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.shape import LayerShape, ModelShape, Recurrence
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece
from lightning_wlb.planning.replica_plans import laid_out, replica_plan
from lightning_wlb.planning.slicing import slice_pieces
from lightning_wlb.planning.synthetic_lengths import generator_a
from lightning_wlb.prediction.step_totals import ReplicaTotals, StepTotals
from lightning_wlb.sharding import ADAPTIVE
from tests.prediction.test_predictor import SHAPE, predictor

NARROW = LayerShape(16, 4, 64, 64, 1024 * 1024, 2816 * 1024 * 3, sliding_window=700)
MIXED = ModelShape.of_layers(1024, 32000, [*SHAPE.kinds, NARROW] * 2)
ACROSS = Recurrence(heads=24, flops=10**6, moved=8192, state=2**18, last_rows=3 * 2048)
RECURRENT = LayerShape(1, 1, 1, 1, 1024 * 4096, 2816 * 1024 * 3, recurrence=ACROSS)
HYBRID = ModelShape.of_layers(1024, 32000, [RECURRENT, *SHAPE.kinds] * 2)


def plans_of(lengths, packs, mesh, **options):
    """A replica without shardings, and as it is laid out in the end; with their predictor."""
    model = predictor(mesh, **options)
    pieces = [Piece(number, 0, int(tokens), 0) for number, tokens in enumerate(lengths)]
    made = slice_pieces(pieces, packs, 1 << 20, Work.of(SHAPE).total, tile=8, least=16)
    open_plan = replica_plan(made, 0, ADAPTIVE)
    (final,) = laid_out([open_plan], mesh, ADAPTIVE, model.latency.segment_cost)
    return model, open_plan, final


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=10),
    packs=st.integers(1, 6),
    tensor=st.sampled_from([1, 2]),
    shape=st.sampled_from([SHAPE, MIXED, HYBRID]),
)
def test_on_one_rank_nothing_is_estimated(lengths, packs, tensor, shape):
    model, open_plan, final = plans_of(lengths, packs, Mesh(tensor=tensor), shape=shape)
    assert model.costs(open_plan) == model.costs(final)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=10),
    packs=st.integers(1, 6),
    context=st.sampled_from([2, 3, 8]),
    tensor=st.sampled_from([1, 4]),
    shape=st.sampled_from([SHAPE, HYBRID]),
)
def test_rows_are_known_before_a_sharding_is_chosen(lengths, packs, context, tensor, shape):
    mesh = Mesh(context=context, tensor=1 if shape is HYBRID else tensor)
    model, open_plan, final = plans_of(lengths, packs, mesh, shape=shape)
    for guess, exact in zip(model.costs(open_plan), model.costs(final), strict=True):
        assert abs(guess.rows - exact.rows) <= tensor
        assert (guess.going_on, guess.ranks) == (exact.going_on, exact.ranks)
        assert (guess.kept_rows > 0) == (exact.kept_rows > 0)
    for size, exact in zip(model.sizes(final), model.costs(final), strict=True):
        assert size[:4] == exact[:4]


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize("packs", [12, 48])
def test_long_context_steps_are_estimated_within_four_percent(context, packs):
    lengths = generator_a(200, 131_072, seed=context)
    model, open_plan, final = plans_of(lengths, packs, Mesh(context=context))
    times = [
        np.array([sum(cost.times.layer_ns[0]) for cost in model.costs(replica)])
        for replica in (open_plan, final)
    ]
    guess, exact = (float(each.sum()) for each in times)
    assert 0.96 * exact <= guess <= 1.04 * exact
    # A planner counts exactly from 90 % of the memory on.
    guess, exact = (
        StepTotals(model, [ReplicaTotals(model, replica, model.costs(replica))]).peak
        for replica in (open_plan, final)
    )
    assert 0.97 * exact <= guess <= 1.03 * exact
