from dataclasses import replace

import pytest

from lightning_wlb.cost.flops import Work
from lightning_wlb.plan import symmetric_backward
from lightning_wlb.planning import DataSettings, MeshSettings, Planner
from lightning_wlb.planning.judge import PipelineJudge
from lightning_wlb.planning.packing.auto import OVERHEAD
from lightning_wlb.planning.workloads import generator_a
from tests.planning.test_slicing import LLAMA2_7B_LAYER, PrefixWork

WINDOW = 131_072
TOTAL = LLAMA2_7B_LAYER.total
FORWARD = LLAMA2_7B_LAYER.forward


def plans(steps, lengths=None, window=WINDOW, **mesh):
    planner = {}
    for packing in ("auto", "slim"):
        planner[packing] = Planner(
            generator_a(2000, window, 1) if lengths is None else lengths,
            DataSettings(window, 4, packing=packing),
            TOTAL,
            MeshSettings(**mesh),
            forward=FORWARD,
        )
    return [tuple(each.next_step() for each in planner.values()) for _ in range(steps)]


def longest(plan, stages=4, per_rank=1):
    judge = PipelineJudge(TOTAL, FORWARD, stages, per_rank, FORWARD(WINDOW // OVERHEAD))
    return judge(plan.replicas).time


def test_the_same_pieces_in_less_time_than_slim():
    for auto, slim in plans(3, pipeline_parallel_size=4):
        assert auto.pieces == slim.pieces
        assert auto.max_delay == 0
        assert longest(auto) < 0.96 * longest(slim)


def test_virtual_stages_are_judged_as_such():
    for auto, slim in plans(2, pipeline_parallel_size=4, stages_per_rank=2):
        assert longest(auto, 4, 2) <= longest(slim, 4, 2)


def test_a_sliding_window_makes_long_pieces_cheaper():
    """Slices under a window have equal work by the pairs that it leaves."""
    work = Work(replace(LLAMA2_7B_LAYER.shape, sliding_window=4096))
    lengths = generator_a(2000, WINDOW, 1)
    mesh = MeshSettings(pipeline_parallel_size=4)
    for packing in ("slim", "auto"):
        planner = Planner(
            lengths, DataSettings(WINDOW, 4, packing=packing), work.total, mesh,
            forward=work.forward,
        )  # fmt: skip
        plan = planner.next_step()
        (replica,) = plan.replicas
        loads = [
            sum(work.total(part.tokens, part.context) for part in replica.slices_of(group))
            for group in replica.forward
        ]
        assert sum(loads) == sum(work.total(piece.tokens) for piece in plan.pieces)
        if packing == "slim":
            assert len(loads) == 16
            assert max(loads) <= 1.02 * sum(loads) / 16


def test_no_slices_and_few_micro_batches_without_a_pipeline():
    for auto, _ in plans(3):
        (replica,) = auto.replicas
        assert all(part.context == 0 for part in replica.slices)
        assert len(replica.forward) <= -(-auto.tokens // WINDOW) + 1


def test_a_piece_above_the_capacity_is_shared_where_that_is_faster():
    lengths = [WINDOW, *[2000] * 200]
    for auto, _ in plans(1, lengths, replicas=4, pipeline_parallel_size=2):
        shared = [group for group in auto.replicas[0].forward if len(group.replicas) > 1]
        assert shared
        total = PrefixWork.of(TOTAL)
        mean = sum(total(piece.tokens) for piece in auto.pieces) / 4
        assert total(WINDOW) > mean
        assert longest(auto, 2) < 1.6 * mean


@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_schedule_without_slices_gets_whole_pieces_of_its_own(asymmetric):
    """The same pieces as with slices, and more micro-batches than they need: there is a bubble."""
    mesh = {"replicas": 2, "pipeline_parallel_size": 2}
    lengths = generator_a(2000, WINDOW, 1)
    data = DataSettings(WINDOW, 16, asymmetric=asymmetric)
    with_slices, without = (
        Planner(lengths, data, TOTAL, MeshSettings(**mesh, slices=slices), forward=FORWARD)
        for slices in (True, False)
    )
    counts = []
    for _ in range(3):
        plan, other = without.next_step(), with_slices.next_step()
        assert plan.pieces == other.pieces
        for number, replica in enumerate(plan.replicas):
            assert {group.replicas for group in replica.forward} == {(number,)}
            assert not any(part.context for part in replica.slices)
            assert replica.backward == symmetric_backward(replica.slices, replica.forward)
            fewest = -(-sum(part.tokens for part in replica.slices) // WINDOW)
            counts.append(len(replica.forward) - fewest)
    assert max(counts) > 1


@pytest.mark.parametrize("stages", [1, 3])
def test_whole_pieces_that_pack_badly_take_as_many_micro_batches_as_they_need(stages):
    """Each piece is above half of the cap: one micro-batch each, not the half that tokens need."""
    planner = Planner(
        [600] * 10,
        DataSettings(1000, 6),
        TOTAL,
        MeshSettings(pipeline_parallel_size=stages, slices=False),
    )
    (replica,) = planner.next_step().replicas
    assert [len(group.slices) for group in replica.forward] == [1] * len(replica.slices)
    assert len(replica.slices) == 10


def test_a_single_piece_on_more_replicas_than_pieces():
    for auto, _ in plans(1, [100], replicas=3, pipeline_parallel_size=2):
        assert sum(len(replica.forward) > 0 for replica in auto.replicas) >= 1
        assert auto.tokens == 100


def released(replicas=1, budget=0.25, nominal=8, steps=30):
    """The pieces of the steps of a run in which nearly every piece is above a replica's share."""
    planner = Planner(
        [WINDOW, *[4000] * 30] * 60,
        DataSettings(
            WINDOW, 2, packing="auto", delay_budget=budget, nominal_replicas=nominal, shuffle=False
        ),
        TOTAL,
        MeshSettings(replicas=replicas),
        forward=FORWARD,
    )
    return [planner.next_step() for _ in range(steps)]


def test_pieces_above_a_nominal_replicas_share_wait_whatever_the_mesh():
    one, two = released(), released(replicas=2)
    assert [plan.pieces for plan in one] == [plan.pieces for plan in two]
    delay = sum(plan.delay * plan.tokens for plan in one) / sum(plan.tokens for plan in one)
    assert 0 < delay < 1


def test_nothing_waits_without_a_budget_or_with_one_nominal_replica():
    for plans_ in (released(budget=0), released(nominal=1)):
        assert all(plan.max_delay == 0 for plan in plans_)


def test_asymmetric_plans_are_tried_if_asked_for():
    made = {}
    for asymmetric in (False, True):
        planner = Planner(
            [3600] * 12,
            DataSettings(4096, 2, packing="auto", asymmetric=asymmetric, shuffle=False),
            TOTAL,
            MeshSettings(pipeline_parallel_size=4),
            forward=FORWARD,
        )
        planner.next_step()  # validates
        made[asymmetric] = planner.next_step()
    assert made[True].pieces == made[False].pieces
    times = {
        key: PipelineJudge(TOTAL, FORWARD, 4, 1, FORWARD(4096 // OVERHEAD))(plan.replicas).time
        for key, plan in made.items()
    }
    assert times[True] <= times[False]
