"""SlimPack: equal micro-batches without delay, symmetric and asymmetric."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing.slim import asymmetric_replica_plan, slice_pieces_asymmetric
from lightning_wlb.planning.synthetic_lengths import generator_a
from lightning_wlb.prediction.asymmetric_units import units
from lightning_wlb.schedule.packflow import backward_order, packflow
from tests.planning.test_slicing import LINEAR, LLAMA2_7B_LAYER, pieces_of
from tests.schedule.proof import check_schedule

WINDOW = 131_072
FORWARD, BACKWARD = LLAMA2_7B_LAYER.forward, LLAMA2_7B_LAYER.backward


def plans(steps, replicas=1, cap=None, **options):
    planner = Planner(
        generator_a(4000, WINDOW, 1),
        DataSettings(WINDOW, 4, packing={"method": "slim", **options}, cap=cap),
        LLAMA2_7B_LAYER,
        Mesh(data=replicas),
    )
    return [planner.next_step() for _ in range(steps)]


def loads(plan):
    return [
        [
            sum(
                LLAMA2_7B_LAYER.total(part.tokens, part.context)
                for part in replica.slices_of(micro_batch)
            )
            for micro_batch in replica.forward
        ]
        for replica in plan.replicas
    ]


@pytest.mark.parametrize(("options", "count"), [({}, 16), ({"micro_packs": 2}, 8)])
def test_equal_micro_batches_without_delay(options, count):
    cap = WINDOW * 16 // count
    for plan in plans(4, cap=cap, **options):
        assert plan.max_delay == 0
        (work,) = loads(plan)
        assert len(work) == count
        assert max(work) * count < sum(work) * 1.012
        assert max(map(plan.replicas[0].tokens_of, plan.replicas[0].forward)) <= cap


def above_the_capacity(**mesh):
    """One document has more work than half of the step."""
    planner = Planner(
        [WINDOW, *[2000] * 60],
        DataSettings(WINDOW, 2, packing="slim", shuffle=False),
        LLAMA2_7B_LAYER,
        Mesh(data=2, **mesh),
    )
    return planner.next_step()


def test_a_piece_above_the_capacity_is_shared_in_slices():
    plan = above_the_capacity()
    assert [len(replica.forward) for replica in plan.replicas] == [4, 4]
    for replica in plan.replicas:
        shared = [micro_batch for micro_batch in replica.forward if micro_batch.replicas == (0, 1)]
        assert list(replica.forward[: len(shared)]) == shared
        assert sum(map(replica.tokens_of, shared)) == WINDOW
        own = [micro_batch for micro_batch in replica.forward if len(micro_batch.replicas) == 1]
        assert sum(map(replica.tokens_of, own)) == 60_000


def test_virtual_stages_cannot_share():
    """The piece stays on one replica, which has more micro-batches nearly as large."""
    first, second = loads(above_the_capacity(virtual_stages=2))
    assert (len(first), len(second)) == (6, 2)
    assert max(first) < 1.5 * max(second)  # in as many micro-batches each, 4.3


def test_asymmetric_packs_balance_each_pass_and_share_nothing():
    """Backward groups the slices otherwise; either pass alone is more even than symmetric packs."""
    (symmetric,) = plans(1, replicas=2)
    (plan,) = plans(1, replicas=2, asymmetric=True)
    assert plan.pieces == symmetric.pieces
    for number, replica in enumerate(plan.replicas):
        assert {micro_batch.replicas for micro_batch in replica.forward} == {(number,)}
        assert {micro_batch.slices for micro_batch in replica.forward} != {
            micro_batch.slices for micro_batch in replica.backward
        }
        for micro_batches, work in (
            (replica.forward, LLAMA2_7B_LAYER.forward),
            (replica.backward, LLAMA2_7B_LAYER.backward),
        ):
            own = [
                sum(work(part.tokens, part.context) for part in replica.slices_of(micro_batch))
                for micro_batch in micro_batches
            ]
            assert max(own) * len(own) < 1.02 * sum(own)


def plan_of(pieces, forward, backward, cap):
    replica = asymmetric_replica_plan(forward, backward, 0, "per_document")
    return StepPlan(0, 0, (replica,), tuple(sorted(pieces)), 0, cap, 4, 4 * cap)


def test_backward_takes_a_piece_from_its_end():
    """Backward work doubles towards the end of the piece, so its packs are other slices."""
    forward, backward = slice_pieces_asymmetric(
        pieces_of([3000]), 3, 3000, LINEAR, PassWork(1000, 1), tile=1, least=1
    )
    assert [[part.start for part in pack] for pack in forward] == [[0], [1000, 1449], [2000, 2316]]
    assert [pack[0].stop for pack in backward] == [3000, 2316, 1449]


def test_the_same_packs_where_both_passes_cost_alike():
    forward, backward = slice_pieces_asymmetric(
        pieces_of([2000, 1000, 500, 500]), 4, 4000, LINEAR, LINEAR, tile=100, least=100
    )
    assert forward == [
        [Slice(0, 0, 0, 1000)],
        [Slice(0, 0, 1000, 2000)],
        [Slice(1, 0, 0, 1000)],
        [Slice(2, 0, 0, 500), Slice(3, 0, 0, 500)],
    ]
    assert [forward.index(pack) for pack in backward] == [1, 0, 2, 3]


@given(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), max_size=30),
    st.integers(1, 10),
    st.integers(100, 3000),
    st.sampled_from([(1, 1), (8, 16), (128, 512)]),
    st.sampled_from([(FORWARD, BACKWARD), (LINEAR, PassWork(1, 50))]),
)
def test_every_plan_is_valid_and_its_units_run(lengths, packs, cap, grain, works):
    tile, least = grain
    pieces = pieces_of(lengths)
    forward, backward = slice_pieces_asymmetric(pieces, packs, cap, *works, tile=tile, least=least)
    assert all(forward)
    assert all(backward)
    assert len(backward) <= len(forward)
    plan = plan_of(pieces, forward, backward, cap).validate()
    order, needs = backward_order(units(plan.replicas[0], 1, 1))
    check_schedule([packflow(rank, 3, order, needs) for rank in range(3)], len(order))
