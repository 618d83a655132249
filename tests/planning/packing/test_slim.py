"""SlimPack: equal micro-batches without delay."""

import pytest

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
