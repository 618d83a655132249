from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, Slice
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer, WorkScorer
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import slice_pieces
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.recompute import recomputing
from lightning_wlb.schedule.actions import BACKWARD, FORWARD
from lightning_wlb.schedule.packflow import backward_order, packflow
from lightning_wlb.schedule.programs import program_of
from tests.cost.devices import with_usable
from tests.schedule.support import simulate

WORK = Work(PassWork(2, 2), PassWork(4, 4))
total, forward = WORK.total, WORK.forward


def scorer_of(ranks: int, virtual_stages: int = 1, overhead: int = 0) -> WorkScorer:
    return WorkScorer(WORK, Mesh(pipeline=ranks, virtual_stages=virtual_stages), overhead)


def test_a_slice_costs_what_it_adds_to_its_prefix():
    parts = [[Slice(0, 5, 5, 45)], [Slice(0, 5, 45, 105)]]
    plan = replica_plan(parts, 0, "")
    scorer = scorer_of(1)
    assert scorer([plan]) == (total(100), 100)


def test_layers_with_different_windows_are_weighed_by_each():
    work = Work(PassWork(2, 2, None, ((9, 3), (30, 1))), PassWork(4, 4, None, ((9, 6), (30, 5))))
    parts = [[Slice(0, 5, 5, 45), Slice(1, 0, 0, 20)], [Slice(0, 5, 45, 105)]]
    plan = replica_plan(parts, 0, "")
    scorer = WorkScorer(work, Mesh())
    assert scorer([plan]) == (work.total(100) + work.total(20), 120)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=20),
    packs=st.integers(1, 24),
    ranks=st.integers(1, 6),
    taper=st.integers(0, 3),
    overhead=st.integers(0, 10**5),
)
def test_the_recurrence_is_what_the_simulator_finds(lengths, packs, ranks, taper, overhead):
    pieces = [Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths)]
    work = PassWork(1, 1)
    made = slice_pieces(pieces, packs, sum(lengths), work, tile=1, least=5, taper=taper)
    replica = replica_plan(made, 0, "")
    scorer = scorer_of(ranks, overhead=overhead)
    loads = [
        [
            sum(cost(part.stop) - (cost(part.start) if part.start else 0) for part in pack)
            for pack in made
        ]
        for cost in (forward, total)
    ]
    order = backward_order(replica)
    step = simulate(
        [packflow(rank, ranks, *order) for rank in range(ranks)],
        lambda action: (
            overhead
            + loads[0][action.micro_batch] * (1 if action.kind == FORWARD else -1)
            + loads[1][action.micro_batch] * (action.kind == BACKWARD)
        ),
        changed_bytes=lambda action: sum(part.tokens for part in made[action.micro_batch]),
    )
    assert scorer([replica]) == (step.total_ns, max(step.peak_bytes))


def test_interleaved_slices_are_judged_by_the_program_that_runs():
    """A late chain raises the warm-up of one stage; rounds of virtual stages plan their own."""
    parts = [
        [Slice(0, 0, 0, 60)],
        [Slice(1, 0, 0, 70)],
        [Slice(2, 0, 0, 40)],
        [Slice(2, 0, 40, 80)],
    ]
    replica = replica_plan(parts, 0, "per_sequence")
    scorer = scorer_of(2, 2, overhead=3)
    programs = [program_of("interleaved", rank, 2, 2, [replica], 0) for rank in range(2)]

    def duration(action):
        (part,) = replica.slices_of(replica.forward[action.micro_batch])
        first, both = (
            work(part.stop) - (work(part.start) if part.start else 0) for work in (forward, total)
        )
        return (first if action.kind == FORWARD else both - first) // 2 + 3

    step = simulate(programs, duration)
    assert scorer([replica]).time == step.total_ns


def test_a_shared_micro_batch_is_divided_and_begins_when_both_can():
    part, own = [Slice(0, 0, 0, 100)], [Slice(1, 0, 0, 100)]
    shared = [(part, (0, 1))]
    plans = [
        replica_plan([own], 0, "", shared),
        replica_plan([], 1, "", shared),
    ]
    scorer = scorer_of(1)
    assert scorer(plans) == (total(100) * 110 // 200 + total(100), 100)


def test_a_profile_prefers_whole_pieces_where_small_kernels_are_slow():
    """On an H100 the shortest step of a small pipeline has fewer micro-batches than by work."""
    shape = ModelShape(1024, 8, 16, 4, 64, 2816, 32000)
    latency = LatencyModel(Profile.load("h100"), shape, Mesh(pipeline=2))
    scorer = ProfileScorer(Predictor(latency, (range(4), range(4, 8))))
    assert scorer.limit < latency.profile.memory_bytes
    counts = {}
    for name, chosen in (("work", None), ("profile", scorer)):
        planner = Planner(
            [900, 500, 300] * 8,
            DataSettings(4096, 2, packing="auto"),
            Work.of(shape),
            Mesh(pipeline=2),
            scorer=chosen,
        )
        plan = planner.next_step()
        counts[name] = len(plan.replicas[0].forward)
        for micro_batch in plan.replicas[0].forward:
            assert micro_batch.rows == plan.replicas[0].tokens_of(micro_batch)
    assert counts["profile"] < counts["work"]


def test_plans_are_judged_with_the_recomputation_that_they_get():
    shape = ModelShape(1024, 8, 16, 4, 64, 2816, 32000)
    latency = LatencyModel(Profile.load("h100"), shape, Mesh(pipeline=2))
    stages = (range(4), range(4, 8))
    data = DataSettings(8192, 4, packing="original", shuffle=False)
    planned = [[8192] * 4, data, Work.of(shape), Mesh(pipeline=2)]
    plan = Planner(*planned).next_step()
    roomy = Predictor(latency, stages)
    none, full = (
        roomy.simulate(recomputing(plan.replicas, mode)).peak_bytes for mode in ("none", "full")
    )
    bounds = [ProfileScorer(roomy, mode)(plan.replicas) for mode in ("none", "full")]
    assert bounds[0].time < bounds[1].time
    assert full < none <= bounds[0].peak < roomy.usable_bytes
    between = with_usable(latency.profile, (none + full) // 2, latency.mesh)
    small = replace(latency, profile=between)
    scorer = ProfileScorer(Predictor(small, stages))
    verdict = scorer(plan.replicas)
    assert bounds[0].time < verdict.time < bounds[1].time
    assert full < verdict.peak <= scorer.limit < none
    # The plan that is made says what it was judged with.
    settled = Planner(*planned, scorer=scorer).next_step()
    fixed = ProfileScorer(Predictor(small, stages), "none")
    assert {each.recompute for each in settled.replicas[0].forward} != {"none"}
    assert scorer.predictor.predict(settled).peak_bytes == verdict.peak
    assert fixed.settled(settled.replicas) == list(plan.replicas)
    assert Planner(*planned, scorer=fixed, activation_checkpointing="none").next_step() == plan
