from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.synthetic_lengths import generator_a
from tests.planning.test_slicing import LLAMA2_7B_LAYER

WINDOW = 131_072


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


def test_equal_micro_batches_without_delay():
    for plan in plans(8):
        assert plan.max_delay == 0
        (work,) = loads(plan)
        assert len(work) == 16
        assert max(work) * 16 < sum(work) * 1.012
        assert max(map(plan.replicas[0].tokens_of, plan.replicas[0].forward)) <= WINDOW


def test_micro_packs_are_a_multiple_of_n():
    for plan in plans(3, micro_packs=2, cap=2 * WINDOW):
        (work,) = loads(plan)
        assert len(work) == 8
        assert max(work) * 8 < sum(work) * 1.012


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
