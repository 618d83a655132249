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
