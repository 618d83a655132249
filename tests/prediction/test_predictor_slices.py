"""Predicted slices and shared micro-batches: keys that travel between them, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan
from tests.prediction.test_predictor import H100, plan_of, predictor


def test_a_later_slice_attends_to_the_earlier_ones() -> None:
    model = predictor(Mesh())
    cost = model.micro_batch([Slice(0, 100, 4196, 5220)], "per_sequence")
    expected = model.latency.attention_ns(np.array([1024]), np.array([5120]))[False]
    assert cost.times.attention_ns[0] == expected
    assert cost.keys == 5120


def test_keys_of_slices_are_put_together_and_again_in_backward() -> None:
    model = predictor(Mesh())
    latency, width = model.latency, 2 * 4 * 64 * 2  # keys and values, heads, head_dim, bf16
    later = model.micro_batch([Slice(0, 0, 4096, 5120)], "per_sequence")
    rate = H100.element_bytes_per_second / 1e9
    read = round(5120 * width * 2 / rate)
    added = round(5120 * width // 2 * (2 + 2 * 4) / rate)
    for backward, copies in ((False, read), (True, read + added)):
        rest = later.times.attention_ns[backward] + latency.linear_ns(1024, backward=backward)
        assert later.times.layer_ns[0][backward] - rest == copies
    # A first slice reads what it has.
    whole = model.micro_batch([Slice(0, 0, 0, 1024)], "per_sequence", going_on=1)
    assert whole.times.layer_ns[0][0] == whole.times.attention_ns[0] + latency.linear_ns(
        1024, backward=False
    )


def test_earlier_keys_travel_in_both_passes() -> None:
    model = predictor(Mesh(context=2))
    whole = model.micro_batch([Slice(0, 0, 0, 1024)], "per_document_contiguous")
    later = model.micro_batch([Slice(0, 0, 3000, 4024)], "per_document_contiguous")
    latency = model.latency

    def gather(rows: int, keys: int, backward: bool) -> int:
        return latency.exchange_keys_ns(rows, keys, backward=backward)

    for backward in (False, True):
        expected = whole.times.layer_ns[0][backward] - whole.times.attention_ns[backward]
        expected += later.times.attention_ns[backward]
        expected += gather(512 + 1500, later.keys, backward) - gather(512, whole.keys, backward)
        if backward:  # which reads them once more
            expected += gather(512 + 1500, later.keys, False) - gather(512, whole.keys, False)
        # The slowest rank may be the one that reads fewer keys.
        assert later.times.layer_ns[0][backward] == pytest.approx(expected, rel=0.005)


def shared_plan(tokens: int) -> StepPlan:
    """One document, shared by two replicas of which the second also has one of its own."""
    shared = MicroBatch((0,), "per_sequence", tokens // 2, (0, 1))
    own = MicroBatch((1,), "per_sequence", 512, (1,))
    document = Slice(0, 0, 0, tokens)
    first = ReplicaPlan((document,), (shared,))
    second = ReplicaPlan((document, Slice(1, 0, 0, 512)), (shared, own))
    return replace(plan_of([[[tokens]], [[512]]]), replicas=(first, second)).validate()


def test_replicas_that_share_a_micro_batch_are_one_context_group() -> None:
    model = predictor(Mesh(data=2))
    prediction = model.predict(shared_plan(8192))
    cost = prediction.costs[0][0]
    assert cost == prediction.costs[1][0]
    by_context = predictor(Mesh(context=2)).micro_batch([Slice(0, 0, 0, 8192)], "per_sequence")
    assert cost.rows == by_context.rows == 4096
    assert cost.times.attention_ns == by_context.times.attention_ns
    first, second = prediction.simulations
    assert first.spans[0] == second.spans[0][:2]
    with pytest.raises(ValueError, match="one stage per pipeline rank, not 2"):
        predictor(Mesh(data=2, pipeline=2, virtual_stages=2), schedule="interleaved").predict(
            shared_plan(64)
        )


def test_slices_hold_their_own_keys_and_the_gradients_of_what_later_slices_read() -> None:
    model = predictor(Mesh())
    parts = (Slice(0, 0, 0, 1000), Slice(0, 0, 1000, 3000))
    micro_batches = tuple(
        MicroBatch((at,), "per_sequence", part.tokens, (0,)) for at, part in enumerate(parts)
    )
    replica = ReplicaPlan(parts, micro_batches)
    plan = replace(plan_of([[[3000]]]), replicas=(replica,)).validate()
    prediction = model.predict(plan)
    first, second = prediction.costs[0]
    assert (first.keys, first.indexed, first.kept_rows) == (1000, 0, 1000)
    assert (second.keys, second.indexed, second.kept_rows) == (3000, 0, 0)
    memory, (ends,) = model.memory.model, model.memory.parts
    constant = memory.state_bytes(ends) + memory.input_bytes(ends, 3000, 0)
    opened = [memory.micro_batch_bytes(ends, rows) for rows in (1000, 2000)]
    gradients = 4 * 8 * 2 * 1000 * 4 * 64  # bytes, layers, keys and values, rows, heads, width
    # Forward and forward; the second slice's backward leaves gradients to the first one's.
    (held,) = prediction.simulations[0].held_bytes
    assert [each - constant for each in held] == [
        opened[0], sum(opened), sum(opened), opened[0] + gradients,
    ]  # fmt: skip
    assert held[-1] - prediction.simulations[0].changes[0][-1] == constant
