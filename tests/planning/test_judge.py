from itertools import pairwise

from lightning_wlb.cost.communication import Mesh
from lightning_wlb.cost.flops import ModelShape, Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.plan import Slice
from lightning_wlb.planning import DataSettings, MeshSettings, Planner
from lightning_wlb.planning.judge import PipelineJudge, PredictedJudge
from lightning_wlb.planning.predict import Predictor
from lightning_wlb.planning.replicas import replica_plan


def total(tokens: int) -> int:
    return 3 * tokens * (tokens + 1)


def forward(tokens: int) -> int:
    return tokens * (tokens + 1)


def equal_packs(count: int):
    """Slices of one piece and whole pieces, all of the same work."""
    whole = [[Slice(number, 0, 0, 100)] for number in range(1, count)]
    return replica_plan([[Slice(0, 0, 0, 100)], *whole], 0, lambda slices, replicas: ("", 0))


def test_equal_micro_batches_take_the_closed_form():
    judge = PipelineJudge(total, forward, ranks=4, overhead=7)
    result = judge([equal_packs(6)])[0]
    assert result.total_ns == (6 + 3) * (total(100) + 14)
    assert result.peak_bytes == (400, 300, 200, 100)


def test_virtual_stages_divide_the_bubble():
    judge = PipelineJudge(total, forward, ranks=4, stages_per_rank=2)
    assert judge([equal_packs(8)])[0].total_ns == (2 * 8 + 3) * total(100) // 2


def test_a_slice_costs_what_it_adds_to_its_prefix():
    parts = [[Slice(0, 5, 5, 45)], [Slice(0, 5, 45, 105)]]
    plan = replica_plan(parts, 0, lambda slices, replicas: ("", 0))
    judge = PipelineJudge(total, forward, ranks=1)
    assert judge([plan])[0].total_ns == total(100)
    assert judge([plan])[0].peak_bytes == (100,)


def test_an_overhead_makes_many_micro_batches_dear():
    free, dear = (PipelineJudge(total, forward, ranks=2, overhead=o) for o in (0, 10**6))

    def sliced(count):
        cuts = [100 * index // count for index in range(count + 1)]
        parts = [[Slice(0, 0, a, b)] for a, b in pairwise(cuts)]
        return replica_plan(parts, 0, lambda slices, replicas: ("", 0))

    assert free([sliced(8)])[0].total_ns < free([sliced(2)])[0].total_ns
    assert dear([sliced(8)])[0].total_ns > dear([sliced(2)])[0].total_ns


def test_nothing_takes_no_time():
    plan = replica_plan([], 0, lambda slices, replicas: ("", 0))
    assert PipelineJudge(total, forward, ranks=3)([plan])[0].total_ns == 0


def test_a_shared_micro_batch_is_divided_and_begins_when_both_can():
    part, own = [Slice(0, 0, 0, 100)], [Slice(1, 0, 0, 100)]
    shared = [(part, (0, 1))]
    plans = [
        replica_plan([own], 0, lambda slices, replicas: ("", 0), shared),
        replica_plan([], 1, lambda slices, replicas: ("", 0), shared),
    ]
    first, second = PipelineJudge(total, forward, ranks=1)(plans)
    assert first.busy_ns == (total(100) * 110 // 200 + total(100),)
    assert second.busy_ns == (total(100) * 110 // 200,)
    assert second.peak_bytes == (50,)
    ends = [{str(span.action): span.end_ns for span in each.spans[0]} for each in (first, second)]
    assert ends[0]["0B0"] == ends[1]["0B0"]


def test_a_profile_prefers_whole_pieces_where_small_kernels_are_slow():
    """On an H100 the shortest step of a small pipeline has fewer micro-batches than by work."""
    shape = ModelShape(1024, 8, 16, 4, 64, 2816, 32000)
    latency = LatencyModel(Profile.load("h100"), shape, Mesh(pipeline=2))
    judge = PredictedJudge(Predictor(latency, (range(4), range(4, 8))))
    assert judge.limit < latency.profile.memory_bytes
    counts = {}
    for name, chosen in (("work", None), ("profile", judge)):
        planner = Planner(
            [900, 500, 300] * 8,
            DataSettings(4096, 2, packing="auto"),
            Work(shape).total,
            MeshSettings(pipeline_parallel_size=2),
            judge=chosen,
        )
        plan = planner.next_step()
        counts[name] = len(plan.replicas[0].forward)
        for group in plan.replicas[0].forward:
            assert group.rows == plan.replicas[0].tokens_of(group)
    assert counts["profile"] < counts["work"]
