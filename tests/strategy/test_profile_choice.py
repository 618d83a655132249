"""The profile that a run measures for itself: agreed on, kept, and carried in checkpoints."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from lightning_wlb.cost.profile import ActionOverhead, Link, Profile
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.data import cache as cached
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.heterogeneous.setup import Dynamic
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import Scheme
from lightning_wlb.strategy import profile_choice as automatic
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.strategy.profile_choice import (
    Measurement,
    ProfileChoice,
    agreed_profile,
    decoder_like,
)
from lightning_wlb.strategy.run_planning import RunPlanning
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training.precision import name_of
from tests.ranks import run_ranks
from tests.strategy.harness import VOCABULARY, Case, Recorder, data, module, trainer

CPU, PIPELINE = torch.device("cpu"), Mesh(pipeline=2)
CASE = Case("auto", layers=2)
LENGTHS = (900, 400, 300, 200, 100, 80, 60, 900, 500, 200, 150, 90, 40, 30, 20, 10)


def asked(**options: Any) -> Measurement:
    config = decoder_like(TransformerConfig.preset("tiny").shape)
    assert config is not None
    defaults = {"config": config, "device": CPU, "dtype": torch.float32, "backend": "auto"}
    defaults |= {"ranks": 2, "link": Link(1000.0, 1e9)}
    return Measurement(**(defaults | options))


def measured(action_ns: float) -> Profile:
    """What a measurement could have found, with actions that cost so much."""
    return replace(Profile.load("cpu"), action=ActionOverhead((action_ns, action_ns)))


class Measurements:
    """In place of real ones: each finds actions of another cost."""

    def __init__(self, costs: list[float | Exception]) -> None:
        self.costs, self.made = costs, 0

    def quickly(self, *args: Any, **options: Any) -> Profile:
        cost = self.costs[self.made]
        self.made += 1
        if isinstance(cost, Exception):
            raise cost
        assert torch.is_grad_enabled()
        torch.rand(1)  # a measurement draws random numbers
        return replace(measured(cost), dtype=name_of(options["dtype"]))

    def patched(self, folder: Path):
        """Cached in the folder."""
        return mock.patch.multiple(
            automatic,
            measure_quickly=self.quickly,
            measure_overhead=lambda *args: ActionOverhead((5.0, 7.0), parameter_ns=0.5),
        ), mock.patch.object(cached, "user_cache_dir", lambda name: str(folder / name))


def profiles(
    folder: Path, costs: list[float | Exception], *wanted: Measurement
) -> list[Profile | None]:
    measurements = Measurements(costs)
    first, second = measurements.patched(folder)
    with first, second:
        found = [agreed_profile(each) for each in wanted]
    assert measurements.made == len(costs)
    return found


def test_a_profile_is_measured_once_and_found_again(tmp_path: Path) -> None:
    one, other = asked(), asked(dtype=torch.bfloat16)
    before = torch.random.get_rng_state()
    with torch.inference_mode():
        found = profiles(tmp_path, [100.0, 200.0], one, one, other, one)
    assert torch.equal(torch.random.get_rng_state(), before)
    action = ActionOverhead((105.0, 107.0), parameter_ns=0.5)
    cores = Profile.load("cpu").devices_per_node
    expected = replace(
        measured(100.0),
        action=action,
        links={"node": Link(1000.0, 1e9)},
        devices_per_node=2,
        memory_bytes=measured(0.0).memory_bytes * cores // 2,
    )
    assert [found[0], found[0]] == [found[1], found[3]]
    assert found[0] == replace(expected, sources=found[0].sources)
    assert found[2] is not None
    assert found[2].action.ns == (205.0, 207.0)
    # Another process finds it too, unless it is damaged.
    assert profiles(tmp_path, [], one) == [found[0]]
    for path in tmp_path.rglob("profile.json"):
        path.write_text("{")
    assert profiles(tmp_path, [300.0], one)[0].action.ns == (305.0, 307.0)


def test_what_fails_to_be_measured_ends_in_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"could not measure.*no memory.*profile=\"none\""):
        assert profiles(tmp_path, [torch.OutOfMemoryError("no memory")], asked()) == [None]
    assert not list(tmp_path.rglob("profile.json"))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_that_was_measured_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    layers: list[weakref.ref[nn.Module]] = []
    quickly = Measurements.quickly

    def measure(*args: Any, **options: Any) -> Any:
        layer = nn.Identity()
        layer.register_forward_hook(lambda *_: layer)  # as those of ParameterBuckets, in a circle
        layers.append(weakref.ref(layer))
        if fails:
            raise torch.OutOfMemoryError("no memory")
        return quickly(*args, **options)

    monkeypatch.setattr(Measurements, "quickly", measure)
    monkeypatch.setattr(automatic, "rank_zero_warn", print)
    gc.disable()
    try:
        profiles(tmp_path, [] if fails else [100.0], asked())
        assert [each() for each in layers] == [None]
    finally:
        gc.enable()


def test_a_device_of_known_memory_between_nodes(tmp_path: Path) -> None:
    several = asked(network=Link(9000.0, 5e8), memory_bytes=10**9)
    (found,) = profiles(tmp_path, [100.0], several)
    assert found is not None
    assert found.memory_bytes == 10**9
    assert found.links == {"node": Link(1000.0, 1e9), "network": Link(9000.0, 5e8)}


def test_the_decoder_that_is_measured_has_the_sizes_of_the_commonest_layer() -> None:
    config = TransformerConfig.preset("llama3-8b", sliding_window=4096)
    assert decoder_like(config.shape) == replace(
        TransformerConfig.preset("llama3-8b"), layers=1, rope_theta=10_000.0
    )
    layer = config.shape.each_layer[0]
    wide = replace(layer, heads=64, attention_parameters=2 * layer.attention_parameters)
    made = decoder_like(ModelShape.of_layers(4096, 100, [wide, layer, wide]))
    assert (made.heads, made.ffn_dim, made.vocab_size) == (64, 14_336, 100)
    experts = LayerShape(4, 4, 16, 16, 10, 3 * 64 * 8, idle_parameters=999)
    assert decoder_like(ModelShape.of_layers(64, 0, [experts])) is None


def documents() -> InMemoryDocuments:
    generator = np.random.default_rng(0)
    return InMemoryDocuments(
        [generator.integers(0, VOCABULARY, length) for length in LENGTHS], vocab_size=VOCABULARY
    )


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    warnings.filterwarnings("ignore")

    def run(
        cache: str, costs: list[float], steps: int, path: Path | None = None, save: bool = False
    ) -> dict[str, Any]:
        """What ran, and how often it was measured."""
        # Ranks find other numbers; those of rank 0 count.
        measurements = Measurements([each + 1e9 * rank for each in costs])
        first, second = measurements.patched(folder / f"{cache}-{rank}")
        recorder = Recorder()
        options = {"documents": documents(), "context_window": 1000, "micro_batches": 2}
        documents_ = data(CASE, profile=None, **options)
        strategy = WLBStrategy(pipeline_parallel_size=2)
        runner = trainer(strategy, 2, callbacks=[recorder], max_steps=steps, max_epochs=-1)
        with first, second:
            runner.fit(module(CASE), documents_, ckpt_path=path)
        if save:
            runner.save_checkpoint(saved)
        return {
            "plans": recorder.plans,
            "losses": recorder.losses,
            "measured": measurements.made,
            "profile": documents_.measured,
        }

    saved = folder / "saved.ckpt"
    return {
        "unbroken": run("this node", [1e8], 2),
        "half": run("this node", [], 1, save=True),
        "rest": run("another node", [], 2, saved),
    }


def test_ranks_agree_and_a_resumed_run_has_the_plans_of_an_unbroken_one(tmp_path: Path) -> None:
    ranks = run_ranks(on_two_ranks, 2, tmp_path, process_group=False)
    assert ranks[0] == ranks[1]
    unbroken, half, rest = ranks[0].values()
    assert [each["measured"] for each in ranks[0].values()] == [1, 0, 0]
    assert half["plans"] + rest["plans"] == unbroken["plans"]
    assert half["losses"] + rest["losses"] == unbroken["losses"]
    # Rank 0's own number, and a link that both have measured together.
    profile = Profile.from_json(half["profile"])
    assert profile.action.ns == (1e8 + 5.0, 1e8 + 7.0)
    assert 1e6 < profile.links["node"].bytes_per_second < 1e12
    assert rest["profile"] == half["profile"]


def chosen(
    documents_: WLBDataModule,
    *,
    mesh: Mesh = PIPELINE,
    nodes: int = 1,
    base: Profile | None = None,
    outcome: Profile | None = None,
    dynamic: Dynamic = "off",
) -> tuple[Profile | None, list[Measurement]]:
    """By what a run on nodes of two ranks is planned, and what was to be measured for it."""
    choice, wanted = ProfileChoice(), []
    choice.profile = choice.unmeasured = base
    devices = RunDevices(
        device=CPU,
        count=2 * nodes,
        per_node=2,
        compute_dtype=torch.float32,
        parameter_dtype="float32",
        reduce_dtype="float32",
    )

    def measure(asked: Measurement) -> Profile | None:
        wanted.append(asked)
        return outcome

    leaves = RunPlanning(dynamic).may_leave(mesh, documents_)
    with mock.patch.object(automatic, "agreed_profile", measure):
        choice.measure(devices, mesh, documents_, module(CASE), leaves_mesh=leaves)
    return choice.profile, wanted


def wants(options: dict[str, Any] | None = None, **run: Any) -> bool:
    return bool(chosen(data(CASE, **({"profile": None} | (options or {}))), **run)[1])


def test_a_device_is_measured_where_plans_depend_on_times() -> None:
    fixed, context = {"packing": "best_fit", "sharding": "hybrid"}, Mesh(context=2)
    assert wants()
    # Replicas alone: by work, unless steps are planned by a profile anyway.
    assert not wants(mesh=Mesh(data=2))
    assert wants(mesh=Mesh(data=2), base=measured(1.0))
    assert wants({"packing": "best_fit", "sharding": "adaptive"}, mesh=context)
    assert not wants(fixed, mesh=context)
    dealt, strategies = fixed | {"packing": "hydraulis"}, [[Scheme(0, (2,)), Scheme(1, (2,))]]
    assert not wants(dealt, mesh=context)
    assert wants(dealt, mesh=context, dynamic=strategies)
    assert wants(dealt, mesh=context, dynamic="auto")
    assert not wants(fixed, mesh=context, dynamic="auto")  # which cannot leave the mesh
    assert not wants(dealt, mesh=Mesh(pipeline=2, virtual_stages=2), dynamic="auto")
    assert not wants({"packing": "best_fit", "sharding": "adaptive"})
    assert not wants({"profile": "none"})
    assert not wants({"profile": "cpu"})
    assert not wants(mesh=Mesh())
    # What lies between the nodes is only known from a profile.
    assert not wants(nodes=2)
    assert not wants(nodes=2, base=measured(1.0))
    network = {"node": Link(1.0, 1e9), "network": Link(2.0, 1e8)}
    base = replace(measured(1.0), links=network, memory_bytes=123)
    _, (found,) = chosen(data(CASE, profile=None), nodes=2, base=base)
    assert (found.link, found.network, found.memory_bytes) == (*network.values(), 123)


def test_what_a_checkpoint_brings_goes_before_a_measurement() -> None:
    base, other = measured(1.0), replace(measured(3.0), kernel="cpu")
    base = replace(base, devices_per_node=2)
    gpu = replace(other, device_type="cuda")
    for brought, expected, measures in (
        (None, other, 1),
        (replace(base, kernel="cpu").to_json(), replace(base, kernel="cpu"), 0),
        ("", base, 0),  # that run could not measure, and went on by what it had
        (gpu.to_json(), other, 1),  # of another kind of device
        # Of one rank a node: a mesh of two would lead to a node that nothing is known of.
        (replace(base, kernel="cpu", devices_per_node=1).to_json(), other, 1),
    ):
        documents_ = data(CASE, profile=None)
        documents_.load_state_dict(
            {"planner": None} | ({} if brought is None else {"profile": brought})
        )
        profile, wanted = chosen(documents_, base=base, outcome=other)
        assert (profile, len(wanted)) == (expected, measures)
        assert documents_.state_dict()["profile"] == (other.to_json() if measures else brought)
    documents_ = data(CASE, profile=None)
    documents_.load_state_dict({"planner": None, "profile": replace(base, kernel="cpu").to_json()})
    with mock.patch.object(automatic, "rank_zero_info") as said:
        chosen(documents_)
    (line,) = said.call_args.args
    assert line.startswith("WLBStrategy: steps are planned by profile cpu: ")
    assert line.endswith(", as before.")
    documents_ = data(CASE, profile=None)
    assert chosen(documents_, base=base)[0] == base
    assert documents_.state_dict() == {"planner": None, "profile": ""}
    assert data(CASE).state_dict() == {"planner": None}


def known(device: str, searched: bool, given: Profile | None = None, nodes: int = 1):
    """The profile that a run begins with on so many nodes of four devices."""
    found = Profile.load("cpu" if device == "cpu" else "h100")
    choice = ProfileChoice()
    devices = RunDevices(
        device=torch.device(device),
        count=4 * nodes,
        per_node=4,
        compute_dtype=torch.float32,
        parameter_dtype="float32",
        reduce_dtype="float32",
    )
    with mock.patch.object(automatic, "shipped_profile", return_value=found):
        choice.begin(devices, "auto", given, searched=searched)
    assert choice.unmeasured == choice.profile
    return choice.profile


def test_runs_on_gpus_and_those_that_search_plan_by_a_profile() -> None:
    cpu, h100, four = Profile.load("cpu"), Profile.load("h100"), {"devices_per_node": 4}
    assert known("cpu", searched=False) is None
    assert known("cpu", searched=True) == replace(cpu, **four)
    assert known("cuda", searched=False) == replace(h100, **four)
    assert known("cuda", searched=True, nodes=2) == replace(h100, **four)
    # The data module's is its own affair, unless a mesh is chosen by it.
    own = replace(h100, name="own", devices_per_node=2)
    assert known("cuda", searched=False, given=own) is None
    assert known("cuda", searched=True, given=own) == replace(own, **four)
    # Nothing is known of what lies between nodes of CPUs.
    assert known("cpu", searched=True, nodes=2) is None
