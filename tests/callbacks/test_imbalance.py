"""Imbalance degrees against numbers worked out by hand, and their bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.callbacks.imbalance import (
    ATTENTION,
    COMPUTE,
    Level,
    context_level,
    data_level,
    in_pipelines,
    measured_imbalance,
    pipeline_level,
    planned_work,
    rank_seconds,
    rank_timings,
    shapes_of,
    shares_of,
    slots,
)
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Scheme, Slice, StepPlan, rank_in
from lightning_wlb.schedule.actions import Action, Timing


def make_plan(lengths: list[list[list[int]]], micro_batches: int, arrival: int = 0) -> StepPlan:
    """Replicas of micro-batches of whole documents, numbered as they come."""
    pieces, replicas = [], []
    for number, groups in enumerate(lengths):
        slices: list[Slice] = []
        forward = []
        for group in groups:
            first = len(slices)
            for tokens in group:
                slices.append(Slice(len(pieces), 0, 0, tokens))
                pieces.append(Piece(len(pieces), 0, tokens, arrival))
            forward.append(
                MicroBatch(tuple(range(first, len(slices))), "per_document", sum(group), (number,))
            )
        replicas.append(ReplicaPlan(tuple(slices), tuple(forward)))
    tokens = sum(piece.tokens for piece in pieces)
    return StepPlan(
        step=3,
        epoch=0,
        replicas=tuple(replicas),
        pieces=tuple(pieces),
        target_tokens=tokens - len(pieces),
        cap=1000,
        micro_batches=micro_batches,
        nominal_tokens=100,
    ).validate()


def test_timings_stand_at_their_micro_batch_and_pass():
    timings = [
        Timing(Action(1, "F", 0), begin=0.0, wall=9.0, compute=1.0, attention=0.5),
        Timing(Action(1, "F", 2), begin=1.0, wall=9.0, compute=2.0, attention=0.25),
        Timing(Action(1, "B", 0), begin=2.0, wall=9.0, compute=3.0, attention=0.75),
    ]
    expected = np.zeros((4, 2, 2))
    expected[0] = [[1.0, 0.5], [3.0, 0.75]]
    expected[2, 0] = [2.0, 0.25]
    np.testing.assert_array_equal(rank_timings(timings, 4), expected)


def test_ranks_land_at_their_place_in_pipelines_that_differ():
    strategy = Scheme(0, (1, 1), context=2), Scheme(4, (2,)), Scheme(5, (2,), tensor=3)
    shapes = shapes_of(replace(make_plan([[], [], []], 1), schemes=strategy), Mesh(data=8))
    placed = in_pipelines(np.arange(8.0)[:, None], shapes)
    for rank in range(8):
        at = rank_in(strategy, rank)
        assert placed[at.data][at.pipeline, at.context, at.tensor] == rank


def test_a_micro_batch_takes_its_slowest_rank_on_each_stage_and_pass():
    # One replica, two stages of two context ranks, two micro-batches.
    seconds = np.zeros((1, 2, 2, 1, 2, 2, 2))
    forward, backward = 0, 1
    seconds[0, 0, :, 0, 0, forward, COMPUTE] = 1.0, 3.0
    seconds[0, 0, :, 0, 0, backward, COMPUTE] = 5.0, 2.0
    seconds[0, 1, :, 0, 0, forward, COMPUTE] = 0.5, 0.25
    seconds[0, 1, :, 0, 1, backward, COMPUTE] = 7.0, 8.0
    np.testing.assert_array_equal(rank_seconds(seconds), [[2 * 8.5, 2 * 8.0]])


def test_levels_of_a_step_worked_out_by_hand():
    seconds = np.zeros((2, 1, 2, 1, 2, 2, 2))
    # Replica 0 has micro-batches of 6 and 2 seconds on 2 ranks, replica 1 one of 4.
    seconds[0, 0, :, 0, 0, 0, COMPUTE] = 6.0, 5.0
    seconds[0, 0, :, 0, 1, 0, COMPUTE] = 1.0, 2.0
    seconds[1, 0, :, 0, 0, 1, COMPUTE] = 4.0, 4.0
    seconds[0, 0, :, 0, 0, 0, ATTENTION] = 3.0, 1.0
    seconds[1, 0, :, 0, 0, 1, ATTENTION] = 1.0, 2.0
    result = measured_imbalance(seconds, slots=4)
    assert result.pipeline == Level(2 * 6.0 * 4, 2 * 12.0)
    assert result.pipeline.degree == 2.0
    assert result.data == Level(2 * 8.0 * 2, 2 * 12.0)
    assert result.data.degree == 4 / 3
    assert result.context == Level(2 * (3.0 + 2.0), 2 * (2.0 + 1.5))


def test_levels_of_pipelines_that_differ_worked_out_by_hand():
    # Of 4 ranks, two stages have a micro-batch of 3 + 1 seconds; two context ranks two of 2 and 4.
    deep, wide = np.zeros((2, 1, 1, 2, 2, 2)), np.zeros((1, 2, 1, 2, 2, 2))
    deep[:, 0, 0, 0, 0, COMPUTE] = 3.0, 1.0
    wide[0, :, 0, 0, 0, COMPUTE] = 2.0, 2.0
    wide[0, :, 0, 1, 1, COMPUTE] = 1.0, 4.0
    deep[1, 0, 0, 0, 0, ATTENTION] = 1.0
    wide[0, :, 0, 1, 1, ATTENTION] = 1.0, 3.0
    result = measured_imbalance([deep, wide], slots=3)
    # Rank-seconds: 4, and 4 and 8. Each pipeline has 2 of 4 ranks, so that its share is 1.
    assert result.pipeline == Level(8.0 * 3, 16.0)
    assert result.data == Level(12.0 * 2, 16.0)
    # Two ranks wait until 3 of the 4 seconds have passed; on a rank alone there is no waiting.
    assert result.context == Level(1.0 + 2 * 3.0, 1.0 + 4.0)
    # One more rank alone, with as much for each of its ranks as the heaviest pipeline.
    alone = np.zeros((1, 1, 1, 2, 2, 2))
    alone[0, 0, 0, 0, 0, COMPUTE] = 6.0
    result = measured_imbalance([deep, wide, alone], slots=3)
    # If all 5 ranks had 6 seconds to do.
    assert result.data.degree == pytest.approx(5 * 6 / (4 + 12 + 6))


def test_pipelines_with_work_by_their_ranks_are_even():
    strategy = Scheme(0, (1, 1)), Scheme(2, (2,)), Scheme(3, (2,), context=2, tensor=2)
    work = np.array([[2.0, 2.0], [1.0, 1.0], [4.0, 4.0]])
    plan = replace(make_plan([[[1], [1]]] * 3, micro_batches=6), schemes=strategy)
    assert data_level(work, shares_of(plan)).degree == pytest.approx(1.0)
    # Two micro-batches each, by their ranks, are two of the whole step's.
    assert slots(plan) == pytest.approx(6)
    assert pipeline_level(work, slots(plan), shares_of(plan)).degree == pytest.approx(1.0)
    # As if they were pipelines alike they were not.
    assert data_level(work).degree > 1.7
    # Three of nine are left out, each as large as a micro-batch of the mean pipeline.
    assert slots(replace(plan, micro_batches=9)) == pytest.approx(9)


def test_forward_and_backward_of_attention_count_apart():
    # Each pass waits for its own slowest rank, though the ranks' sums are equal.
    seconds = np.zeros((1, 1, 2, 1, 1, 2, 2))
    seconds[0, 0, :, 0, 0, 0, ATTENTION] = 1.0, 3.0
    seconds[0, 0, :, 0, 0, 1, ATTENTION] = 3.0, 1.0
    assert context_level(seconds).degree == 1.5
    assert np.isnan(context_level(np.zeros_like(seconds)).degree), "no work has no degree"


def test_empty_micro_batches_count_in_the_pipeline_level():
    plan = make_plan([[[10], [10]], [[10]]], micro_batches=4)
    assert slots(plan) == 4
    assert slots(make_plan([[[10], [10]], [[10]]], micro_batches=2)) == 3
    work = np.array([[1.0, 1.0], [1.0, 0.0]])
    assert pipeline_level(work, 4).degree == 4 / 3


SHAPE = ModelShape(dim=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_dim=16, vocab_size=32)


def test_planned_work_and_flops_grow_with_squares_of_pieces():
    work = Work.of(SHAPE)
    plan = make_plan([[[5, 7], [3]], [[11]]], micro_batches=4)
    expected = [[work.total(5) + work.total(7), work.total(3)], [work.total(11), 0]]
    np.testing.assert_array_equal(planned_work(plan, work), expected)
    # Attention of one piece of 12 is more than that of pieces of 5 and 7.
    linear = 3 * 2 * 12 * (2 * (8 * 4 * (2 * 2 + 2) + 3 * 8 * 16) + 8 * 32)
    pairs = 5 * 6 // 2 + 7 * 8 // 2
    attention = 4 * 2 * 2 * 4 * pairs
    assert work.total(5) + work.total(7) == linear + attention + 5 * attention // 2


@given(
    st.integers(1, 4),
    st.lists(st.floats(0.001, 10.0), min_size=1, max_size=24),
    st.integers(0, 5),
)
def test_degrees_are_at_least_one_and_reach_it_only_when_even(replicas, values, empty):
    values = values * replicas
    work = np.array(values).reshape(replicas, -1)
    pipeline = pipeline_level(work, work.size + empty)
    assert pipeline.degree >= 1 - 1e-12
    assert pipeline.degree <= work.size + empty + 1e-9
    data = data_level(work)
    assert 1 - 1e-12 <= data.degree <= replicas + 1e-9
    even = pipeline_level(np.full_like(work, values[0]), work.size)
    assert even.degree == pytest.approx(1.0)
