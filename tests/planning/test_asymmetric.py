from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import Slice, StepPlan
from lightning_wlb.planning.packing.slim import asymmetric_replica_plan, slice_pieces_asymmetric
from lightning_wlb.prediction.asymmetric_units import units
from lightning_wlb.schedule.packflow import backward_order, packflow
from tests.planning.test_slicing import LINEAR, LLAMA2_7B_LAYER, load, pieces_of
from tests.schedule.proof import check_schedule

FORWARD, BACKWARD = LLAMA2_7B_LAYER.forward, LLAMA2_7B_LAYER.backward


def plan_of(pieces, forward, backward, cap):
    replica = asymmetric_replica_plan(
        forward, backward, 0, lambda slices, replicas: ("per_document", 1)
    )
    return StepPlan(0, 0, (replica,), tuple(sorted(pieces)), 0, cap, 4, 4 * cap)


def test_both_passes_are_balanced():
    lengths = [131_072, 90_000, 40_000, 17_000] + [3000] * 40 + list(range(32, 1800, 12))
    pieces = pieces_of(lengths)
    forward, backward = slice_pieces_asymmetric(pieces, 16, 131_072, FORWARD, BACKWARD)
    plan_of(pieces, forward, backward, 131_072).validate()
    for packs, work in ((forward, FORWARD), (backward, BACKWARD)):
        loads = [load(pack, work) for pack in packs]
        assert len(loads) == 16
        assert max(loads) * 16 < sum(loads) * 1.01


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
