"""Steps that leave the mesh where another strategy is simulated to be faster, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.callbacks.imbalance import predicted_imbalance
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.planning.dealing import PipelineKind
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, Schemes, schemes_of
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.predictor import Predictor
from tests.heterogeneous.planning.test_dealing import SHAPE
from tests.prediction.test_predictor import H100, predictor
from tests.prediction.test_predictor import plan_of as whole_documents

DATA = DataSettings(16384, 2, {"method": "slim", "micro_packs": 2}, shuffle=False)
LENGTHS = [1000] * 40 + [16000] * 2 + [500] * 60
MESH = Mesh(tensor=4)
SPREAD = (Scheme(0, (4,), tensor=4),)
ALONE = tuple(Scheme(rank, (4,)) for rank in range(4))
SLOW = tuple(Scheme(rank, (2, 2)) for rank in (0, 2))


def base(mesh: Mesh = MESH, **changes) -> Predictor:
    profile = replace(Profile.load("h100"), **{"memory_bytes": 6_000_000_000} | changes)
    layers = SHAPE.layers // mesh.pipeline
    stages = tuple(range(at, at + layers) for at in range(0, SHAPE.layers, layers))
    return Predictor(LatencyModel(profile, SHAPE, mesh), stages)


def planner(*strategies: Schemes, data: DataSettings = DATA, **changes) -> Planner:
    predictor = base(**changes)
    pool = Pool.of(strategies, predictor) if strategies else None
    return Planner(
        LENGTHS, data, Work.of(SHAPE), MESH, scorer=ProfileScorer(predictor), step_chooser=pool
    )


def test_steps_leave_the_mesh_where_another_strategy_is_faster_and_holds_their_pieces() -> None:
    """Four ranks by themselves exchange nothing within a layer, but hold no long document."""
    chosen, plain = planner(ALONE), planner()
    left = []
    for plan, on_mesh in zip(plan_steps(chosen, 4), plan_steps(plain, 4), strict=True):
        assert plan.pieces == on_mesh.pieces  # what enters a step does not depend on it
        long = any(piece.tokens > 15000 for piece in plan.pieces)
        left.append(bool(plan.schemes))
        assert plan.schemes == (() if long else ALONE)
        if long:
            assert plan.digest == on_mesh.digest
    assert set(left) == {False, True}
    assert chosen.state_dict() == plain.state_dict()


def test_a_run_that_is_resumed_makes_the_same_choices() -> None:
    whole, first = planner(ALONE), planner(ALONE)
    plans = plan_steps(whole, 4)
    assert {bool(plan.schemes) for plan in plans} == {False, True}
    for stopped in range(1, 4):
        first.next_step()
        again = planner(ALONE)
        again.load_state_dict(first.state_dict())
        rest = plan_steps(again, 4 - stopped)
        assert [plan.digest for plan in rest] == [plan.digest for plan in plans[stopped:]]


def test_a_strategy_that_is_not_faster_is_not_taken() -> None:
    other = (Scheme(0, (1, 1, 1, 1)),)
    assert planner(other).next_step().schemes == ()
    assert planner(ALONE, SLOW).next_step().schemes == ALONE


MESHES = (MESH, Mesh(4), Mesh(1, 2, 1, 2), Mesh(1, 2, 2, 1))
OTHERS = (
    ALONE,
    SPREAD,
    SLOW,
    (Scheme(0, (4,), tensor=2), Scheme(2, (1, 3))),
    (Scheme(0, (4,), context=2), Scheme(2, (4,), tensor=2)),
)


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from(MESHES),
    st.lists(st.sampled_from(OTHERS), min_size=1, max_size=3, unique=True),
    st.sampled_from((5, 6, 80)),
    st.lists(st.sampled_from((200, 1000, 3000, 16000)), min_size=9, max_size=40),
    st.sampled_from(({"method": "slim", "micro_packs": 2}, {"method": "hydraulis"})),
)
def test_no_step_is_predicted_to_lose(mesh, strategies, gigabytes, lengths, packing) -> None:
    """What was elected is simulated again, of the plan alone; by overflow, and then by time."""
    # As of a CPU: without process groups that take memory of the device, others on each mesh.
    predictor = base(mesh, memory_bytes=gigabytes * 10**9, device_type="cpu")
    own = schemes_of(mesh, predictor.stages)
    pool = Pool.of([each for each in strategies if each != own] or [OTHERS[3]], predictor)
    scorer, data = ProfileScorer(predictor), replace(DATA, packing=packing)
    given = lengths, data, Work.of(SHAPE), mesh
    plan, plain = (
        Planner(*given, scorer=scorer, step_chooser=each).next_step() for each in (pool, None)
    )
    if not plan.schemes:
        assert plan.digest == plain.digest
        return
    found, on_mesh = pool.predict(plan, predictor), scorer(plain.replicas)
    over, before = (max(peak - scorer.limit, 0) for peak in (found.peak_bytes, on_mesh.peak))
    assert over <= before
    assert over < before or found.total_ns <= 0.995 * on_mesh.time


def test_what_cannot_be_chosen_from_is_refused() -> None:
    with pytest.raises(ValueError, match="the mesh's own strategy"):
        Pool.of([ALONE, SPREAD], base())
    across = (Scheme(0, (4,)), Scheme(1, (4,), tensor=2), Scheme(3, (4,)))
    with pytest.raises(ValueError, match=r"ranks \[1, 3\).* spans nodes of 2 devices"):
        Pool.of([across], base(devices_per_node=2))
    Pool.of([across], base())
    with pytest.raises(ValueError, match="a step chooser needs a device profile"):
        Planner(LENGTHS, DATA, Work.of(SHAPE), step_chooser=Pool.of([ALONE], base()))
    with pytest.raises(ValueError, match="Use packing='auto', 'slim' or 'hydraulis'"):
        planner(ALONE, data=replace(DATA, packing="best_fit"))  # not in some later step


UNEVEN = (Scheme(0, (2, 2)), Scheme(2, (4,)), Scheme(3, (4,)))


def test_a_step_takes_what_the_pool_has_chosen_it_by() -> None:
    own = planner(UNEVEN, ALONE)
    pool = Pool.of([UNEVEN, ALONE], base())
    pieces = own.next_step().pieces
    for made in pool.arranged(pieces, own.packer):
        plan = replace(own.next_step(), schemes=made.schemes, replicas=made.replicas, pieces=pieces)
        step = pool.predict(plan, base())
        assert step.total_ns == made.time_ns
        assert step.latency.mesh.devices == 4
        assert len(step.simulations) == len(made.schemes)
        # Nothing waits for another context rank; a stage's idle time is that of its ranks.
        assert predicted_imbalance(step).context.degree == pytest.approx(1.0)
        busy = sum(sum(each.busy_ns) for each in step.simulations)
        assert busy == step.work_ns.sum()
        latest = max(step.simulations, key=lambda each: each.total_ns)
        assert step.total_ns == latest.total_ns


def test_pipelines_that_share_a_micro_batch_wait_for_each_other_and_no_others() -> None:
    """The second and the fourth of four pipelines share their first micro-batch."""
    plan = whole_documents([[[500]], [[4000], [9000]], [[30000]], [[4000]]])
    alone = predictor(replace(base().latency.mesh, data=4, tensor=1), profile=H100)
    strategy = tuple(Scheme(rank, (8,)) for rank in range(4))
    plan = replace(plan, schemes=strategy)
    pool = Pool(
        {strategy: {strategy[0].shape: PipelineKind(strategy[0], ProfileScorer(alone), count=4)}}
    )
    apart = pool.predict(plan, alone)
    replicas = list(plan.replicas)
    for number in (1, 3):
        first, *rest = replicas[number].forward
        forward = (replace(first, replicas=(1, 3)), *rest)
        replicas[number] = replace(replicas[number], forward=forward)
    shared = replace(plan, replicas=tuple(replicas))
    met = pool.predict(shared, alone)
    for number in (0, 2):
        assert met.simulations[number].spans == apart.simulations[number].spans
    spans = [met.simulations[number].spans[0] for number in (1, 3)]
    assert spans[0][0] == spans[1][0]
    assert spans[0][0] != apart.simulations[1].spans[0][0]
