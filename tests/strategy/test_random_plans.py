"""Any legal plan validates, simulates, runs and conserves; what is not legal is refused by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan
from lightning_wlb.prediction.asymmetric_units import units
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.recompute import recomputing
from lightning_wlb.schedule.programs import program_of
from tests.models.steps import documents
from tests.oracle import oracle, relative_error
from tests.schedule.proof import check_schedule
from tests.schedule.support import simulate
from tests.strategy.random_plans import (
    batch_of,
    micro_batch,
    model_of,
    plan_of,
    random_replica,
    run_step,
)

KINDS = ("symmetric", "asymmetric")
# With only shorter documents some gradients would be zero but for rounding.
LENGTHS = st.lists(st.integers(1, 12), max_size=4).map(lambda lengths: [7, *lengths])
RANDOM = st.randoms(use_true_random=False)


def tokens_of(part: Slice) -> list[tuple[int, int]]:
    return [(part.document, token) for token in range(part.start, part.stop)]


@given(LENGTHS, RANDOM, st.sampled_from(KINDS), st.sampled_from([1, 2]), st.sampled_from([None, 4]))
@settings(max_examples=15)
def test_legal_plans_run_with_the_gradients_of_dense_attention(lengths, draw, kind, stages, window):
    replica = random_replica(draw, lengths, kind)
    (replica,) = recomputing([replica], MODES[len(lengths) % 3])
    plan = plan_of(replica, lengths).validate()
    assert StepPlan.from_json(plan.to_json()) == plan
    batch = batch_of(plan, lengths, window)
    model = model_of(sliding_window=window)
    loss, program = run_step(model, batch, stages)

    for groups in (batch.units.forward, batch.units.backward):
        run = Counter(
            token
            for each in groups
            for part in replica.slices_of(each)
            for token in tokens_of(part)
        )
        assert run == {(d, t): 1 for d, length in enumerate(lengths) for t in range(length)}
    assert len(program) == stages * (len(batch.units.forward) + len(batch.units.backward))

    pieces = [(document, 0, length) for document, length in enumerate(lengths)]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    want, expected = oracle(model_of(sliding_window=window), documents(lengths), pieces)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    for name, reference in expected.items():
        found = gradients[name]
        error = relative_error(torch.zeros_like(reference) if found is None else found, reference)
        assert error <= 1e-10, name


@given(LENGTHS, RANDOM, st.sampled_from(KINDS), st.integers(1, 4), st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_legal_plans_simulate_without_deadlock(lengths, draw, kind, ranks, virtual_stages):
    replica = units(random_replica(draw, lengths, kind), 1, 1)
    schedule = "1f1b" if virtual_stages == 1 else "interleaved"
    programs = [
        program_of(schedule, rank, ranks, virtual_stages, [replica], 0) for rank in range(ranks)
    ]
    check_schedule(programs, len(replica.forward), virtual_stages)

    def work(action):
        return replica.tokens_of(replica.forward[action.micro_batch])

    step = simulate(programs, lambda action: work(action) * (1 if action.kind == "F" else 2))
    # Every token passes every stage, forward and backward.
    assert sum(step.busy_ns) == 3 * sum(lengths) * ranks * virtual_stages
    assert step.total_ns >= max(step.busy_ns)


@given(LENGTHS, RANDOM, st.sampled_from(KINDS))
@settings(max_examples=8)
def test_keys_and_their_gradients_are_freed_with_their_own_backward(lengths, draw, kind):
    replica = random_replica(draw, lengths, kind)
    batch = batch_of(plan_of(replica, lengths).validate(), lengths)
    plan = batch.units
    last = {
        part.document: number
        for number, each in enumerate(plan.forward)
        for part in plan.slices_of(each)
    }
    # A micro-batch keeps its keys if any of its slices is not its piece's last.
    keeps = {
        number
        for number, each in enumerate(plan.forward)
        if any(part.stop < lengths[part.document] for part in plan.slices_of(each))
    }
    assert all(
        last[part.document] >= number
        for number, each in enumerate(plan.forward)
        for part in plan.slices_of(each)
    )
    open_now: set[int] = set()

    def watch(step, action):
        (open_now.add if action.kind == "F" else open_now.remove)(action.micro_batch)
        assert {each.micro_batch for each in step.boundaries} == open_now
        held = {number for _, number in step.cache._entries}
        assert held == keeps & open_now

    run_step(model_of(), batch, 1, watch)
    assert not open_now


def changed(replica: ReplicaPlan, pass_name: str, groups: list[list[int]]) -> ReplicaPlan:
    made = tuple(micro_batch(members, replica.slices) for members in groups)
    return replace(replica, **{pass_name: made})


def groups_of(replica: ReplicaPlan, pass_name: str) -> list[list[int]]:
    return [list(each.slices) for each in getattr(replica, pass_name)]


@given(LENGTHS, RANDOM, st.sampled_from(KINDS), st.sampled_from(["forward", "backward"]))
@settings(max_examples=40)
def test_plans_that_cannot_run_are_refused_with_the_reason(lengths, draw, kind, pass_name):
    replica = random_replica(draw, lengths, kind)
    plan = plan_of(replica, lengths).validate()
    groups = groups_of(replica, pass_name)
    victim = draw.randrange(len(replica.slices))
    part = replica.slices[victim]

    def refuse(other: ReplicaPlan, message: str, **fields) -> None:
        with pytest.raises(ValueError, match=message):
            replace(plan, replicas=(other,), **fields).validate()

    missing = [[member for member in each if member != victim] for each in groups]
    refuse(changed(replica, pass_name, [each for each in missing if each]), "is in no micro-batch")
    twice = [*groups, [victim]]
    refuse(changed(replica, pass_name, twice), "is in micro-batches")
    shorter = list(replica.slices)
    shorter[victim] = part._replace(stop=part.stop + 1)
    refuse(replace(replica, slices=tuple(shorter)), "in two slices, or beyond the end")
    if part.tokens > 1:
        shorter[victim] = part._replace(stop=part.stop - 1)
        refuse(replace(replica, slices=tuple(shorter)), "were released but are in no slice")
    most = max(replica.tokens_of(each) for each in (*replica.forward, *replica.backward))
    refuse(replica, f"has {most} tokens, more than the cap of {most - 1}", cap=most - 1)
    # Two slices of a piece that are in different micro-batches, exchanged.
    places = {member: number for number, each in enumerate(groups) for member in each}
    neighbours = [
        (one, two)
        for one, two in pairwise(range(len(replica.slices)))
        for two in range(one + 1, len(replica.slices))
        if replica.slices[one].document == replica.slices[two].document
        and places[one] != places[two]
    ]
    if neighbours:
        one, two = draw.choice(neighbours)
        swap = {one: two, two: one}
        swapped = [[swap.get(member, member) for member in each] for each in groups]
        refuse(changed(replica, pass_name, swapped), "slices run forward in order and backward")


@given(LENGTHS, RANDOM, st.sampled_from(KINDS))
@settings(max_examples=8)
def test_replicas_share_what_they_say_that_they_share(lengths, draw, kind):
    replica = random_replica(draw, lengths, kind)

    def shared_by(replicas: tuple[int, ...], other: ReplicaPlan) -> ReplicaPlan:
        def share(each: MicroBatch) -> MicroBatch:
            return replace(each, replicas=replicas)

        return replace(
            other,
            forward=tuple(map(share, other.forward)),
            backward=tuple(map(share, other.backward)),
        )

    def plan(*replicas: ReplicaPlan) -> StepPlan:
        return replace(plan_of(replica, lengths), replicas=replicas)

    both = shared_by((0, 1), replica)
    plan(both, both).validate()
    with pytest.raises(ValueError, match="doubled: replicas"):
        plan(replica, shared_by((1,), replica)).validate()
    with pytest.raises(ValueError, match="but replica 1 does not list it"):
        plan(both, ReplicaPlan((), (), ())).validate()
    three = shared_by((0, 1, 2), replica)
    with pytest.raises(ValueError, match="not an aligned power-of-two range"):
        plan(three, three, three).validate()
    odd = shared_by((1, 2), replica)
    with pytest.raises(ValueError, match="not an aligned power-of-two range"):
        plan(ReplicaPlan((), (), ()), odd, odd).validate()
