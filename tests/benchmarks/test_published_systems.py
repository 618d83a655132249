"""The arithmetic by which published collectives, steps and memory are compared, not the errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published import Fact, collectives, facts, sources, steps
from lightning_wlb.cost.communication import Communication
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.planning import DataSettings


def fact_of(kind: str, unit: str, **changes: str) -> Fact:
    """The first fact of a unit whose columns are those, or changed to be."""
    found = next(each for each in facts(kind) if each.unit == unit)
    return replace(found, sizes={**found.sizes, **changes})


def test_each_fact_is_predicted_as_something_positive() -> None:
    for kind, predict in (("collectives", collectives.predict), ("steps", steps.predict)):
        known = sources()
        for fact in facts(kind):
            assert fact.source.id in known
            assert predict(fact) > 0


def test_a_collective_is_what_its_group_takes() -> None:
    profile = Profile.load("h200")
    sizes = {"ranks": "8", "per_node": "8", "bytes": str(2**26), "profile": "h200"}
    made = Communication(profile, Mesh(data=8))
    gather = fact_of("collectives", "us", **sizes, collective="all_gather")
    assert collectives.predict(gather) == made.collective_ns("data", 8, 2**26) / 1e3
    scatter = made.collective_ns("data", 8, 2**26, summed=True)
    reduce = fact_of("collectives", "us", **sizes, collective="reduce_scatter")
    assert collectives.predict(reduce) == scatter / 1e3


RUN = {
    "profile": "h100", "device": "H100 SXM", "power": "700", "model": "llama-3.1-8b",
    "sequence": "4096", "sequences": "2", "micro_batches": "1", "data": "8", "pipeline": "1",
    "virtual": "1", "context": "1", "tensor": "1", "per_node": "8", "recompute": "none",
    "code": "fused", "hidden": "", "rest": "float32",
}  # fmt: skip


def step(**changes: str) -> Fact:
    return fact_of("steps", "s", **{**RUN, **changes})


def test_units_of_a_step_are_of_one_time() -> None:
    seconds = steps.predict(step())
    tokens = 2 * 4096
    assert steps.predict(replace(step(), unit="tokens/s/GPU")) == pytest.approx(tokens / seconds)
    flops = steps.megatron_flops("llama-3.1-8b", 4096)
    rate = steps.predict(replace(step(), unit="TFLOP/s/GPU"))
    assert rate == pytest.approx(tokens / seconds * flops / 1e12)


def test_what_a_run_did_not_do_takes_no_time() -> None:
    assert steps.predict(step(code="eager")) > steps.predict(step(code="compiled"))
    assert steps.predict(step(code="compiled")) > steps.predict(step())  # FSDP's copies
    times = [steps.predict(step(recompute=mode)) for mode in ("none", steps.PER_OP, "selective")]
    assert times == sorted(times)
    split = {"data": "2", "tensor": "4"}
    assert steps.predict(step(**split, hidden="tensor")) < steps.predict(step(**split))


def test_a_lower_power_limit_lowers_products_and_attention_by_its_cube_root() -> None:
    profile = replace(Profile.load("h100"), element_bytes_per_second=1e30)
    shape = steps.shape_of("llama-3.1-8b")
    whole, half = (
        LatencyModel(steps.run_on(profile, "H100 SXM", power), shape) for power in (700, 350)
    )
    segments = np.array([8192]), np.array([8192])
    for backward in (False, True):
        times = [each.linear_ns(8192, backward=backward) for each in (whole, half)]
        assert times[1] == pytest.approx(2 ** (1 / 3) * times[0], rel=1e-6)
        calls = [
            each.attention_ns(*segments)[backward] - profile.attention_table(128).call_ns[backward]
            for each in (whole, half)
        ]
        assert calls[1] == pytest.approx(2 ** (1 / 3) * calls[0], rel=1e-6)


def test_per_operation_every_second_product_is_saved() -> None:
    latency, _ = steps.simulated(step(recompute=steps.PER_OP))
    theirs = latency.latency
    assert isinstance(theirs, steps.Theirs)
    rest = theirs.profile.layer.seconds(
        2 * 4096 * (4096 * 1024 + 4096 * 4096 + 4096 * 14336), 4096, backward=False
    )
    traffic = theirs.linear_ns(4096, backward=False) - round(
        theirs.profile.layer.seconds(
            2 * 4096 * (2 * 4096 * 1024 + 2 * 4096 * 4096 + 3 * 4096 * 14336), 4096, backward=False
        )
        / theirs.profile.sustained
        * 1e9
    )
    expected = rest / theirs.profile.sustained * 1e9 + traffic
    assert theirs.again_ns(4096, "selective") == pytest.approx(expected, abs=3)


def test_memory_is_shards_and_what_the_loss_holds() -> None:
    def held(**changes: str) -> float:
        return steps.held_bytes(replace(step(**changes), unit="GB"))

    parameters = 8_030_261_248  # as its model card counts them
    # 16 bytes of each parameter are sharded; everything else is as it was.
    assert held(data="8") - held(data="16") == pytest.approx(16 * parameters / 16, rel=1e-3)
    assert held(rest="bfloat16") < held()
    assert held(micro_batches="2") - held() == pytest.approx(2 * parameters, rel=1e-3)
    # Of each logit 12 bytes, of each of 32 layers a token's input and nothing else.
    more = held(sequences="4", recompute="full") - held(recompute="full")
    assert more == pytest.approx(8192 * (12 * 128256 + 32 * 2 * 4096), rel=0.02)


def test_plan_and_the_comparison_make_one_prediction() -> None:
    """They differ by nothing but the times that :class:`.Theirs` says another program spares."""
    mesh, shape = Mesh(data=8), steps.shape_of("llama-3.1-8b")
    profile = Profile.load("h100-fa2")
    request = MeshRequest(
        np.full(64, 8192),
        shape,
        DataSettings(8192, 2),
        profile,
        devices=8,
        reduce_dtype="bfloat16",
        compiled=True,
    )
    own = request.predictor(mesh)
    assert own.latency == LatencyModel(profile, shape, mesh, "bfloat16", compiled=True)
    theirs, _ = steps.simulated(step(profile="h100-fa2", sequence="8192", code="compiled"))
    plan = steps.equal_documents(8192, 2, 1, mesh, "selective")
    alike = replace(theirs, latency=own.latency).simulate([plan])
    simulated = own.simulate([plan])
    assert simulated.costs == alike.costs
    assert simulated.simulations[0].total_ns == alike.simulations[0].total_ns
    assert simulated.peak_bytes == alike.peak_bytes
