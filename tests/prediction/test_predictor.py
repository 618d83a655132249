"""Predicted steps: closed forms, sums of their parts, memory, and bad input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import exposed_keys
from lightning_wlb.cost.profile import ActionOverhead, Link, Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.predictor import (
    Predictor,
    mean_context_of,
    model_stages,
    split_stages,
)

SHAPE = ModelShape(
    dim=1024, layers=8, heads=16, kv_heads=4, head_dim=64, ffn_dim=2816, vocab_size=32000
)
HEADLESS = replace(SHAPE, vocab_size=0)
H100 = Profile.load("h100")
BUSY = replace(H100, attention=tuple(replace(each, at_once=(1, 1)) for each in H100.attention))
"""Calls of attention last as long as their segments: ranks do not differ by their longest tile."""
UNSUMMED = replace(H100, action=replace(H100.action, parameter_ns=0.0))
FREE_MEMORY = replace(H100, element_bytes_per_second=1e30, action=ActionOverhead())


def plan_of(replicas: list[list[list[int]]], sharding: str = "per_document_contiguous") -> StepPlan:
    """Whole documents: replicas of micro-batches of lengths. Rows are not read by a prediction."""
    made, pieces, document = [], [], 0
    for number, micro_batches in enumerate(replicas):
        slices: list[Slice] = []
        forward = []
        for lengths in micro_batches:
            first = len(slices)
            for length in lengths:
                slices.append(Slice(document, 0, 0, length))
                pieces.append(Piece(document, 0, length, 0))
                document += 1
            forward.append(
                MicroBatch(tuple(range(first, len(slices))), sharding, sum(lengths), (number,))
            )
        made.append(ReplicaPlan(tuple(slices), tuple(forward)))
    return StepPlan(
        step=0, epoch=0, replicas=tuple(made), pieces=tuple(pieces), target_tokens=0, cap=10**9,
        micro_batches=sum(map(len, replicas)), nominal_tokens=1,
    )  # fmt: skip


def predictor(
    mesh: Mesh,
    *,
    shape: ModelShape = SHAPE,
    profile: Profile = H100,
    stages: int = 0,
    schedule: str = "1f1b",
) -> Predictor:
    split = model_stages(shape, stages or mesh.stages, 1000)
    return Predictor(LatencyModel(profile, shape, mesh), tuple(split), schedule)


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_equal_micro_batches_take_the_closed_form_of_1f1b(pipeline: int, count: int) -> None:
    model = predictor(Mesh(pipeline=pipeline), shape=HEADLESS, profile=FREE_MEMORY)
    prediction = model.predict(plan_of([[[4096, 2000]] * count]))
    cost = prediction.costs[0][0]
    forward, backward = model.action_ns(0, cost)
    assert (forward, backward) == tuple(8 // pipeline * time for time in cost.times.layer_ns[0])
    message = model.latency.pipeline_ns(cost.rows, 0)
    lower = (pipeline - 1 + count) * (forward + backward)
    compute = prediction.simulations[0].compute_ns
    if pipeline == 1:
        assert compute == lower
    assert lower <= compute <= lower + 2 * (pipeline + count) * message


def test_an_action_is_the_sum_of_its_parts() -> None:
    model = predictor(Mesh(pipeline=2), profile=UNSUMMED)
    pieces = [Slice(0, 0, 0, 3000), Slice(1, 0, 0, 500)]
    cost = model.micro_batch(pieces, "per_sequence")
    latency, rows = model.latency, 3500
    queries = keys = np.array([3000, 500])
    assert cost.rows == cost.keys == rows
    for backward in (False, True):
        attention = latency.attention_ns(queries, keys)[backward]
        assert (
            cost.times.attention_ns[backward] == cost.times.mean_attention_ns[backward] == attention
        )
        layer = attention + latency.linear_ns(rows, backward=backward)
        assert cost.times.layer_ns[0][backward] == layer
        overhead = latency.action_ns(rows, 0, backward=backward)
        first, last = len(model.stages[0]), len(model.stages[1])
        assert first + last == 8
        assert model.action_ns(0, cost)[backward] == (
            first * layer + overhead + latency.embedding_ns(rows, backward=backward)
        )
        assert model.action_ns(1, cost)[backward] == (
            last * layer + overhead + latency.head_ns(rows, backward=backward)
        )


def test_a_backward_sums_the_gradients_of_its_layers_and_head() -> None:
    """Not of the embedding, whose look-up is charged with its gradient."""
    mesh = Mesh(pipeline=2, tensor=2)
    without = predictor(mesh)
    latency = without.latency
    summing = replace(
        without,
        latency=replace(
            latency, profile=replace(latency.profile, action=ActionOverhead(parameter_ns=0.5))
        ),
    )
    bare = replace(
        without,
        latency=replace(latency, profile=replace(latency.profile, action=ActionOverhead())),
    )
    cost = without.micro_batch([Slice(0, 0, 0, 3000)], "per_sequence")
    layers = [len(stage) for stage in without.stages]
    shape = latency.shape
    (layer,) = shape.kinds
    matrices = layer.attention_parameters + layer.feed_forward_parameters
    of_layer = matrices // 2 + layer.vector_parameters
    head = shape.vocab_size // 2 * shape.dim + shape.dim
    for stage, parameters in ((0, layers[0] * of_layer), (1, layers[1] * of_layer + head)):
        forward, backward = (
            with_sums - none
            for with_sums, none in zip(
                summing.action_ns(stage, cost), bare.action_ns(stage, cost), strict=True
            )
        )
        assert (forward, backward) == (0, round(parameters / 2))


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(context=2, tensor=2)], ids=str)
def test_recomputation_adds_a_forward_to_the_backward(mesh: Mesh) -> None:
    model = predictor(mesh, profile=BUSY)
    latency = model.latency
    later = model.micro_batch([Slice(0, 0, 4096, 5120)], "per_document_contiguous")
    (none,), (selective,), (full,) = (later._replace(recompute=how).times.layer_ns for how in MODES)
    rows = later.rows
    assert selective == (none[0], none[1] + latency.again_ns(rows, "selective"))
    # Without it backward puts the keys together again, with it the forward in backward does.
    rest = latency.again_ns(rows, "full")
    # The ranks of a group differ by nanoseconds in which pass is the slower one.
    assert full[0] == none[0]
    assert full[1] == pytest.approx(none[1] + later.times.attention_ns[0] + rest, abs=2)
    kernel = later._replace(recompute="full").times.attention_ns
    assert kernel == pytest.approx(
        (later.times.attention_ns[0], sum(later.times.attention_ns)), abs=1
    )


def test_of_messages_of_keys_what_is_waited_for_counts() -> None:
    links = {"node": Link(0.0, 2e10)}  # longer than the products beside them
    away = predictor(Mesh(context=2), profile=replace(BUSY, links=links))
    behind = replace(away, latency=replace(away.latency, overlap="all"))
    pieces = [Slice(0, 0, 0, 8192)]
    open_cost, cost = (each.micro_batch(pieces, "per_document") for each in (away, behind))
    latency, rows = behind.latency, cost.rows
    there, back = (latency.exchange_keys_ns(rows, 0, backward=each) for each in (False, True))
    fetched, summed, again = exposed_keys(latency, rows, there, back)
    assert again < fetched < there
    assert summed < back
    for mode, in_backward in zip(MODES, (again, again, fetched), strict=True):
        before, now = (
            each._replace(recompute=mode).times.layer_ns[0] for each in (open_cost, cost)
        )
        assert before[0] - now[0] == there - fetched
        assert before[1] - now[1] == (back - summed) + (there - in_backward)


def test_keys_outside_of_a_sliding_window_are_neither_sent_nor_put_in_order() -> None:
    shape = replace(SHAPE, sliding_window=100)
    model = predictor(Mesh(context=2), shape=shape)
    cost = model.micro_batch([Slice(0, 0, 0, 8192)], "per_document_contiguous")
    # The first quarter and the last one on one rank, the middle on the other. Of what is before
    # the last one, and before the middle, 99 keys are in sight.
    assert cost.keys == cost.indexed == 4096 + 99
    exchange = model.latency.exchange_keys_ns(99, cost.keys, backward=False)
    assert cost.times.layer_ns[0][0] == (
        cost.times.attention_ns[0] + exchange + model.latency.linear_ns(4096, backward=False)
    )
    later = predictor(Mesh(), shape=shape).micro_batch([Slice(0, 0, 4096, 5120)], "per_sequence")
    assert later.keys == 1024 + 99


def test_a_context_group_is_as_slow_as_its_slowest_rank() -> None:
    model = predictor(Mesh(context=2), profile=BUSY)
    # Cut as one sequence, the first rank gets all of the long document's dear end.
    pieces = [Slice(0, 0, 0, 8192), *(Slice(number, 0, 0, 512) for number in range(1, 17))]
    one = model.micro_batch(pieces, "per_sequence")
    even = model.micro_batch(pieces, "per_document_contiguous")
    assert sum(one.times.attention_ns) > 1.2 * sum(one.times.mean_attention_ns)
    assert sum(even.times.attention_ns) == pytest.approx(
        sum(even.times.mean_attention_ns), rel=0.01
    )
    assert one.rows == even.rows == 8192


def test_the_slowest_replica_decides_and_data_parallelism_synchronises() -> None:
    model = predictor(Mesh(data=2))
    prediction = model.predict(plan_of([[[8192]], [[512], [512]]]))
    alone = predictor(Mesh()).predict(plan_of([[[8192]]]))
    first = prediction.simulations[0]
    assert first.busy_ns == alone.simulations[0].busy_ns
    # The first unit of 10 is gathered before anything runs, the last one reduced after everything.
    traffic = model.traffic
    assert traffic.buckets == (10,)
    assert first.begin_ns == traffic.gather[0] // 10 > 0
    assert first.compute_ns == first.begin_ns + first.busy_ns[0]
    assert first.synchronisation_ns == traffic.reduce[0] // 10 + traffic.optimise
    assert first.synchronisation_ns < alone.simulations[0].synchronisation_ns
    assert prediction.total_ns == prediction.simulations[1].total_ns
    assert prediction.work_ns.shape == (2, 2)
    assert prediction.work_ns[0, 1] == 0
    assert prediction.work_ns[0, 0] == alone.simulations[0].busy_ns[0]


def test_figures_of_a_step() -> None:
    plan = plan_of([[[8192], [4096, 100]]])
    prediction = predictor(Mesh(pipeline=2)).predict(plan)
    assert prediction.flops == sum(map(Work.of(SHAPE).total, (8192, 4096, 100)))
    seconds = prediction.total_ns / 1e9
    latency = prediction.latency
    assert (latency.mesh.devices, latency.profile.peak_flops) == (2, 989.4e12)
    assert 0 < prediction.flops / seconds / 2 / 989.4e12 < 0.7
    simulation = prediction.simulations[0]
    assert prediction.bubble == pytest.approx(
        1 - sum(simulation.busy_ns) / (2 * simulation.compute_ns)
    )


def test_the_peak_counts_the_open_micro_batches_of_the_schedule() -> None:
    model = predictor(Mesh(pipeline=2))
    prediction = model.predict(plan_of([[[2048]] * 6]))
    most = 0
    for rank, opened in enumerate((2, 1)):
        parts, memory = model.memory.parts[rank], model.memory.model
        most = max(
            most,
            memory.state_bytes(parts)
            + 6 * memory.input_bytes(parts, 2048, 0)
            + opened * memory.micro_batch_bytes(parts, 2048)
            + memory.transient_bytes(parts, 2048, 2048),
        )
    assert prediction.peak_bytes == most
    # The simulator's own account leaves out what lives inside a pass.
    assert max(prediction.simulations[0].peak_bytes) < most


def test_the_longest_micro_batch_fits_in_the_predicted_peak() -> None:
    model = predictor(Mesh(pipeline=2))
    longest = model.longest_micro_batch()
    available = H100.memory_bytes * 92 // 100
    assert model.predict(plan_of([[[longest]]])).peak_bytes <= available
    assert model.predict(plan_of([[[longest + 2000]]])).peak_bytes > available


def test_planned_steps_are_predicted_and_an_idle_replica_too() -> None:
    lengths = np.random.default_rng(0).integers(50, 4000, 300)
    mesh = Mesh(data=2, pipeline=2, context=2, tensor=2)
    model = predictor(mesh)
    planner = Planner(
        lengths,
        DataSettings(8192, 4, packing="wlb"),
        Work.of(SHAPE),
        Mesh(data=2, context=2, tensor=2),
    )
    steps = 0
    while (plan := planner.next_step()) is not None:
        prediction = model.predict(plan)
        steps += 1
        busiest = max(max(simulation.busy_ns) for simulation in prediction.simulations)
        assert busiest <= prediction.simulations[0].compute_ns < prediction.total_ns
        for replica, costs in zip(plan.replicas, prediction.costs, strict=True):
            assert [cost.rows for cost in costs] == [
                micro_batch.rows for micro_batch in replica.forward
            ]
        slowest, mean = prediction.context_ns
        assert slowest >= mean > 0
    assert steps > 10
    empty = model.predict(plan_of([[[1000]], []]))
    assert empty.simulations[1].busy_ns == (0, 0)


def test_stages_carry_the_head_and_contexts_count() -> None:
    assert model_stages(HEADLESS, 4, 1000) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    heavy = replace(SHAPE, vocab_size=500_000)
    assert len(model_stages(heavy, 2, 0)[1]) < len(model_stages(heavy, 2, 0)[0])
    # One document of 4 in windows of 3: 1 + 2 + 3 and 1 pairs over 4 tokens.
    assert mean_context_of(np.array([4]), 3) == 7 // 4
    assert mean_context_of(np.array([1000] * 5), 1000) == 500


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(ValueError, match="one stage a rank"):
        predictor(Mesh(pipeline=2, virtual_stages=2))
    with pytest.raises(ValueError, match="is not one of 1f1b, interleaved"):
        predictor(Mesh(), schedule="zigzag")


def test_layers_that_differ_are_predicted_by_kind_and_split_by_cost() -> None:
    layer, mesh = SHAPE.each_layer[0], Mesh(pipeline=2)
    near = replace(layer, sliding_window=512)
    shape = ModelShape.of_layers(1024, 0, [near] * 6 + [layer] * 4)
    split = model_stages(shape, 2, 50_000)
    assert split == [range(0, 8), range(8, 10)]
    model = Predictor(LatencyModel(UNSUMMED, shape, mesh), tuple(split))
    pieces = [Slice(0, 0, 0, 40_000), Slice(1, 0, 0, 300)]
    cost = model.micro_batch(pieces, "per_sequence")
    alike = [
        predictor(mesh, shape=replace(HEADLESS, sliding_window=window)).micro_batch(
            pieces, "per_sequence"
        )
        for window in (512, None)
    ]
    assert cost.times.layer_ns == tuple(each.times.layer_ns[0] for each in alike)
    for backward in (False, True):
        near_ns, full_ns = (each.times.attention_ns[backward] for each in alike)
        assert cost.times.attention_ns[backward] == round((6 * near_ns + 4 * full_ns) / 10)
        near_ns, full_ns = (each.times.layer_ns[0][backward] for each in alike)
        overhead = model.latency.action_ns(cost.rows, 0, backward=backward)
        embedding = model.latency.embedding_ns(cost.rows, backward=backward)
        first, second = (model.action_ns(stage, cost)[backward] for stage in (0, 1))
        assert first == 6 * near_ns + 2 * full_ns + overhead + embedding
        assert second == 2 * full_ns + overhead
    assert [parts.layers for parts in model.memory.rank_parts] == [(6, 2), (0, 2)]


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be split into 3 pipeline stages"):
        split_stages([1, 1], 3)


@given(st.lists(st.integers(1, 110), min_size=1, max_size=8), st.integers(1, 8))
def test_no_split_is_better(layers: list[int], stages: int) -> None:
    stages = min(stages, len(layers))

    def dearest(cuts: Iterable[int]) -> int:
        edges = [0, *cuts, len(layers)]
        return max(sum(layers[a:b]) for a, b in pairwise(edges))

    found = split_stages(layers, stages)
    assert [layer for part in found for layer in part] == list(range(len(layers)))
    assert all(found)
    best = min(dearest(cuts) for cuts in combinations(range(1, len(layers)), stages - 1))
    assert dearest([part.stop for part in found[:-1]]) == best
