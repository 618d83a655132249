from bisect import bisect_left
from dataclasses import replace

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer, WorkScorer
from lightning_wlb.planning.synthetic_lengths import generator_a
from lightning_wlb.planning.tuning import ACTION_OVERHEAD
from lightning_wlb.prediction.predictor import Predictor, model_stages
from tests.planning.test_slicing import LLAMA2_7B_LAYER, SHAPE

WINDOW = 131_072
TOTAL = LLAMA2_7B_LAYER.total
FORWARD = LLAMA2_7B_LAYER.forward
SMALL = ModelShape(256, 8, 4, 4, 64, 704, 1000)


def plans(steps, lengths=None, window=WINDOW, **mesh):
    planner = {}
    for packing in ("auto", "slim"):
        planner[packing] = Planner(
            generator_a(2000, window, 1) if lengths is None else lengths,
            DataSettings(window, 4, packing=packing),
            LLAMA2_7B_LAYER,
            Mesh(**mesh),
        )
    return [tuple(each.next_step() for each in planner.values()) for _ in range(steps)]


def longest(plan, stages=4, virtual_stages=1):
    mesh = Mesh(pipeline=stages, virtual_stages=virtual_stages)
    scorer = WorkScorer(LLAMA2_7B_LAYER, mesh, FORWARD(WINDOW // ACTION_OVERHEAD))
    return scorer(plan.replicas).time


def test_the_same_pieces_in_less_time_than_slim():
    for auto, slim in plans(3, pipeline=4):
        assert auto.pieces == slim.pieces
        assert auto.max_delay == 0
        assert longest(auto) < 0.96 * longest(slim)


def test_virtual_stages_are_judged_as_such():
    for auto, slim in plans(2, pipeline=4, virtual_stages=2):
        assert longest(auto, 4, 2) <= longest(slim, 4, 2)


def test_a_sliding_window_makes_long_pieces_cheaper():
    """Slices under a window have equal work by the pairs that it leaves."""
    work = Work.of(replace(SHAPE, sliding_window=4096))
    lengths = generator_a(2000, WINDOW, 1)
    for packing in ("slim", "auto"):
        planner = Planner(lengths, DataSettings(WINDOW, 4, packing=packing), work, Mesh(pipeline=4))
        plan = planner.next_step()
        (replica,) = plan.replicas
        loads = [
            sum(work.total(part.tokens, part.context) for part in replica.slices_of(micro_batch))
            for micro_batch in replica.forward
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
    for auto, _ in plans(1, lengths, data=4, pipeline=2):
        shared = [
            micro_batch for micro_batch in auto.replicas[0].forward if len(micro_batch.replicas) > 1
        ]
        assert shared
        mean = sum(TOTAL(piece.tokens) for piece in auto.pieces) / 4
        assert TOTAL(WINDOW) > mean
        assert longest(auto, 2) < 1.6 * mean


def test_whole_pieces_that_pack_badly_take_as_many_micro_batches_as_they_need():
    """Each piece is above half of the cap: one micro-batch each, not the half that tokens need."""
    planner = Planner(
        [600] * 10,
        DataSettings(1000, 6),
        LLAMA2_7B_LAYER,
        Mesh(),
    )
    (replica,) = planner.next_step().replicas
    assert [len(micro_batch.slices) for micro_batch in replica.forward] == [1] * len(replica.slices)
    assert len(replica.slices) == 10


def test_nothing_waits_however_long_documents_are():
    planner = Planner(
        [WINDOW, *[4000] * 30] * 60,
        DataSettings(WINDOW, 2, shuffle=False),
        LLAMA2_7B_LAYER,
        Mesh(data=2),
    )
    assert all(planner.next_step().max_delay == 0 for _ in range(30))


def planned(scorer, mesh, lengths, **settings):
    data = DataSettings(8192, 4, shuffle=False, **settings)
    return Planner(lengths, data, Work.of(SMALL), mesh, scorer=scorer).next_step()


def scorer_of(mesh, tokens, mode):
    """A scorer whose device just holds a micro-batch of so many tokens with that recomputation."""
    stages = tuple(model_stages(SMALL, mesh.stages, 1000))

    def with_memory(megabytes):
        profile = replace(Profile.load("h100"), memory_bytes=megabytes << 20)
        return ProfileScorer(Predictor(LatencyModel(profile, SMALL, mesh), stages))

    def holds(megabytes):
        return with_memory(megabytes).predictor.longest_micro_batch(mode) >= tokens

    return with_memory(bisect_left(range(80_000), True, key=holds))


def longest_of(plan):
    return max(replica.tokens_of(each) for replica in plan.replicas for each in replica.forward)


def test_micro_batches_of_one_stage_are_as_long_as_memory_allows():
    scorer, lengths = scorer_of(Mesh(), 4 * 8192, "none"), [500] * 65
    plan = planned(scorer, Mesh(), lengths)
    assert longest_of(plan) > 8192
    assert plan.cap == max(scorer.longest)
    capped = planned(scorer, Mesh(), lengths, cap=8192)
    assert longest_of(capped) <= capped.cap == 8192
    assert scorer(plan.replicas).time < scorer(capped.replicas).time


def test_a_piece_that_no_replica_holds_is_shared():
    mesh = Mesh(data=4)
    scorer = scorer_of(mesh, 3000, "full")
    assert max(scorer.longest) < 5500
    plan = planned(scorer, mesh, [5500, *[300] * 91])
    assert scorer(plan.replicas).peak <= scorer.limit
    sharers = {len(each.replicas) for replica in plan.replicas for each in replica.forward}
    assert max(sharers) > 1


def test_replicas_that_end_late_are_dealt_less_work():
    """Long pieces use a device better, so that their work takes less time than that of others."""
    mesh = Mesh(data=2)
    scorer = scorer_of(mesh, 4 * 8192, "none")
    lengths = [8192, 8192, *[256] * 64]
    plan = planned(scorer, mesh, lengths)
    first, last = sorted(scorer.ends(plan.replicas))
    assert last <= 1.02 * first
