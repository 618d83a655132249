"""The least recomputation: against every choice of modes, and against the simulator's account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Recompute, ReplicaPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.predictor import Predictor, model_stages
from lightning_wlb.prediction.recompute import recomputing, settled
from tests.cost.devices import with_usable

SHAPE = ModelShape(
    dim=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn_dim=704, vocab_size=1000
)
H100 = Profile.load("h100")


def predictor(mesh: Mesh, usable: int = H100.memory_bytes) -> Predictor:
    """Predicts on a device of which about so many bytes may be filled."""
    profile = with_usable(H100, usable, mesh)
    stages = tuple(model_stages(SHAPE, mesh.stages, 1000))
    schedule = "1f1b" if mesh.virtual_stages == 1 else "interleaved"
    return Predictor(LatencyModel(profile, SHAPE, mesh), stages, schedule)


def planned(lengths: Sequence[int], mesh: Mesh, packing: dict[str, object]) -> list[ReplicaPlan]:
    data = DataSettings(1 << 14, len(lengths), packing=packing, shuffle=False)
    plan = Planner(lengths, data, Work.of(SHAPE), mesh).next_step()
    assert plan is not None
    return list(plan.replicas)


def peak(model: Predictor, replicas: Sequence[ReplicaPlan]) -> int:
    return model.simulate(replicas).peak_bytes


def modes_of(replicas: Sequence[ReplicaPlan]) -> dict[object, Recompute]:
    """What each micro-batch recomputes, those that are shared counted once."""
    return {
        (each.replicas, replica.slices_of(each)): each.recompute
        for replica in replicas
        for each in replica.forward
    }


def with_modes(
    replicas: Sequence[ReplicaPlan], modes: Mapping[object, Recompute]
) -> list[ReplicaPlan]:
    def with_mode(replica: ReplicaPlan) -> ReplicaPlan:
        return replica.changed(
            lambda each: replace(each, recompute=modes[each.replicas, replica.slices_of(each)])
        )

    return list(map(with_mode, replicas))


MESHES = [
    Mesh(), Mesh(pipeline=2), Mesh(pipeline=3, tensor=2), Mesh(data=2, pipeline=2),
    Mesh(pipeline=2, context=2), Mesh(pipeline=2, virtual_stages=2),
]  # fmt: skip
PACKINGS = [{"method": "best_fit"}, {"method": "slim", "micro_packs": 1}]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(64, 8192), min_size=1, max_size=4),
    st.sampled_from(MESHES),
    st.sampled_from(PACKINGS),
    st.floats(-0.1, 1.1),
)
def test_a_step_fits_where_any_choice_of_modes_does(lengths, mesh, packing, part) -> None:
    replicas = planned(lengths, mesh, packing)
    keys = list(modes_of(replicas))
    assume(len(keys) <= 4)
    most, least = (peak(predictor(mesh), recomputing(replicas, mode)) for mode in ("none", "full"))
    model = predictor(mesh, round(least + part * (most - least)))
    chosen = settled(model, replicas)
    assert recomputing(chosen, "none") == replicas
    peaks = {
        modes: peak(model, with_modes(replicas, dict(zip(keys, modes, strict=True))))
        for modes in product(MODES, repeat=len(keys))
    }
    found = tuple(modes_of(chosen).values())
    if min(peaks.values()) > model.usable_bytes:
        assert peaks[found] == min(peaks.values())
        return
    assert peaks[found] <= model.usable_bytes
    # No micro-batch recomputes for nothing.
    for at, mode in enumerate(found):
        for lower in MODES[: MODES.index(mode)]:
            assert peaks[*found[:at], lower, *found[at + 1 :]] > model.usable_bytes


def test_a_replica_that_fits_does_not_recompute_because_another_does_not() -> None:
    mesh = Mesh(data=2)
    replicas = planned([16000, 1000], mesh, {"method": "best_fit"})
    none, full = (peak(predictor(mesh), recomputing(replicas, mode)) for mode in ("none", "full"))
    for usable, mode in ((none, "none"), (none - 1, "selective"), (full, "full"), (1, "full")):
        first, second = settled(predictor(mesh, usable), replicas)
        assert [each.recompute for each in first.forward] == [mode]
        assert [each.recompute for each in second.forward] == ["full" if usable == 1 else "none"]


@pytest.mark.parametrize("mesh", [Mesh(pipeline=8), Mesh(pipeline=4, virtual_stages=2)])
def test_mixed_modes_are_faster_than_one_for_all(mesh: Mesh) -> None:
    replicas = planned(
        [500 + 10 * n for n in range(64)], mesh, {"method": "slim", "micro_packs": 1}
    )
    none, full = (peak(predictor(mesh), recomputing(replicas, mode)) for mode in ("none", "full"))
    model = predictor(mesh, (none + full) // 2)
    chosen = settled(model, replicas)
    assert peak(model, chosen) <= model.usable_bytes
    uniform = [
        model.simulate(recomputing(replicas, mode)).simulations[0].total_ns
        for mode in MODES
        if peak(model, recomputing(replicas, mode)) <= model.usable_bytes
    ]
    assert model.simulate(chosen).simulations[0].total_ns < min(uniform)
