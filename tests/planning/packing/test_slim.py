from lightning_wlb.planning import DataSettings, MeshSettings, Planner
from lightning_wlb.planning.workloads import generator_a
from tests.planning.test_slicing import LLAMA2_7B_LAYER

WINDOW = 131_072


def plans(steps, replicas=1, **settings):
    planner = Planner(
        generator_a(4000, WINDOW, 1),
        DataSettings(WINDOW, 4, packing="slim", **settings),
        LLAMA2_7B_LAYER.total,
        MeshSettings(replicas=replicas),
    )
    return [planner.next_step() for _ in range(steps)]


def loads(plan):
    return [
        [
            sum(
                LLAMA2_7B_LAYER.total(part.tokens, part.context)
                for part in replica.slices_of(group)
            )
            for group in replica.forward
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


def test_a_replica_with_more_work_has_more_micro_batches_as_large_as_the_others():
    """One document above a replica's share stays on one replica."""
    planner = Planner(
        [WINDOW, *[2000] * 60],
        DataSettings(WINDOW, 2, packing="slim", shuffle=False),
        LLAMA2_7B_LAYER.total,
        MeshSettings(replicas=2),
    )
    first, second = loads(planner.next_step())
    assert (len(first), len(second)) == (6, 2)
    assert max(first) < 1.5 * max(second)  # in as many micro-batches each, 4.3
