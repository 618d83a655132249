"""Steps that leave the mesh where another strategy is simulated to be faster, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, Schemes, schemes_of
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.parameter_traffic import ParameterTraffic
from lightning_wlb.prediction.predictor import Predictor
from tests.heterogeneous.planning.test_dealing import SHAPE

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
    for _ in range(4):
        plan, on_mesh = chosen.next_step(), plain.next_step()
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


def test_what_parameters_take_to_travel_decides() -> None:
    """Over a slow link they take longer than a strategy saves; at rest they need not travel."""
    link = Profile.load("h100").links["node"]
    slow = {"node": replace(link, bytes_per_second=link.bytes_per_second / 20)}
    pieces = planner().next_step().pieces
    times = []
    for changes in ({}, {"links": slow}):
        predictor = base(**changes)
        rules = planner().rules
        (made,) = Pool.of([ALONE], predictor).arranged(pieces, rules, DATA.packer)
        times.append(made.time_ns)
    total = ParameterTraffic.of(base().latency, base().memory)
    assert total.gather == (0,)
    # The model of 2 bytes and its gradients of 4 cross a link once; actions hide a part.
    size = 3 / 4 * 6 * base(Mesh(4)).memory.model.parameters(base(Mesh(4)).memory.parts[0])
    added = size * 1e9 * (20 - 1) / link.bytes_per_second
    assert 0.5 * added < times[1] - times[0] <= 1.01 * added


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
    with pytest.raises(ValueError, match="a strategy that is the mesh's own"):
        Pool.of([ALONE, SPREAD], base())
    across = (Scheme(0, (4,)), Scheme(1, (4,), tensor=2), Scheme(3, (4,)))
    with pytest.raises(ValueError, match=r"ranks \[1, 3\).* lies across nodes of 2 devices"):
        Pool.of([across], base(devices_per_node=2))
    Pool.of([across], base())
    with pytest.raises(ValueError, match="sharding='heads' splits the 16 query and 16 key"):
        Pool.of([(Scheme(0, (4,), 3), Scheme(3, (4,)))], base(), sharding="heads")
    with pytest.raises(ValueError, match="a step chooser needs a device profile"):
        Planner(LENGTHS, DATA, Work.of(SHAPE), step_chooser=Pool.of([ALONE], base()))
    with pytest.raises(ValueError, match="Use packing='auto', 'slim' or 'hydraulis'"):
        planner(ALONE, data=replace(DATA, packing="best_fit"))  # not in some later step
