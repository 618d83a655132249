"""The least recomputation: against every choice of modes, and against the simulator's account."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.prediction.predictor import Predictor, model_stages
from lightning_wlb.prediction.recompute import recomputing, settled
from lightning_wlb.prediction.step import MODES

SHAPE = ModelShape(
    dim=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn_dim=704, vocab_size=1000
)
H100 = Profile.load("h100")


def predictor(mesh: Mesh, usable: int = H100.memory_bytes) -> Predictor:
    """Of a device of which about so many bytes may be filled."""
    profile = replace(H100, memory_bytes=-(-usable * 100 // 92))
    stages = tuple(model_stages(SHAPE, mesh.stages, 1000))
    schedule = "1f1b" if mesh.virtual_stages == 1 else "interleaved"
    return Predictor(LatencyModel(profile, SHAPE, mesh), stages, schedule)


def planned(lengths: Sequence[int], mesh: Mesh, packing: dict[str, object]) -> list[ReplicaPlan]:
    data = DataSettings(1 << 14, len(lengths), packing=packing, shuffle=False)
    schedule = "1f1b" if mesh.virtual_stages == 1 else "interleaved"
    plan = Planner(lengths, data, Work.of(SHAPE), mesh, schedule=schedule).next_step()
    assert plan is not None
    return list(plan.replicas)


def peak(model: Predictor, replicas: Sequence[ReplicaPlan]) -> int:
    return model.simulate(replicas).peak_bytes


def every_choice(replicas: Sequence[ReplicaPlan]) -> Iterator[list[ReplicaPlan]]:
    """Each way to give modes to micro-batches, those that are shared counted once."""
    keys = list(
        dict.fromkeys(
            (each.replicas, replica.slices_of(each))
            for replica in replicas
            for each in replica.forward
        )
    )
    for modes in product(MODES, repeat=len(keys)):
        mode = dict(zip(keys, modes, strict=True))
        yield [
            ReplicaPlan(
                replica.slices,
                *(
                    tuple(
                        replace(each, recompute=mode[each.replicas, replica.slices_of(each)])
                        for each in micro_batches
                    )
                    for _, micro_batches in replica.passes
                ),
            )
            for replica in replicas
        ]


MESHES = [
    Mesh(), Mesh(pipeline=2), Mesh(pipeline=3, tensor=2), Mesh(data=2, pipeline=2),
    Mesh(pipeline=2, context=2), Mesh(pipeline=2, virtual_stages=2),
]  # fmt: skip
PACKINGS = [{"method": "best_fit"}, {"method": "slim", "micro_packs": 1}]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(64, 8192), min_size=1, max_size=5),
    st.sampled_from(MESHES),
    st.sampled_from(PACKINGS),
    st.floats(-0.1, 1.1),
)
def test_a_step_fits_where_any_choice_of_modes_does(lengths, mesh, packing, part) -> None:
    replicas = planned(lengths, mesh, packing)
    assume(sum(len(replica.forward) for replica in replicas) <= 5)
    free = predictor(mesh)
    most, least = (peak(free, recomputing(replicas, mode)) for mode in ("none", "full"))
    model = predictor(mesh, round(least + part * (most - least)))
    chosen = settled(model, replicas)
    assert recomputing(chosen, "none") == replicas
    found = peak(model, chosen)
    smallest = min(peak(model, choice) for choice in every_choice(replicas))
    assert (found <= model.usable_bytes) == (smallest <= model.usable_bytes)
    if found > model.usable_bytes:
        assert found == smallest
    if most <= model.usable_bytes:
        assert chosen == replicas
