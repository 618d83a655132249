"""The profile that a run measures for itself: agreed on, kept, and carried in checkpoints."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_wlb.cost.profile import ActionOverhead, Link, Profile
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.data import cache as cached
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.heterogeneous.setup import Dynamic, checked_strategies
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import Scheme, Schemes
from lightning_wlb.strategy import choosing
from lightning_wlb.strategy import profile_choice as automatic
from lightning_wlb.strategy.profile_choice import (
    Measurement,
    agreed_profile,
    decoder_like,
    nearest,
    profile_of,
)
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training.precision import WLBPrecision, name_of
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


def settled(
    documents_: WLBDataModule,
    *,
    mesh: Mesh = PIPELINE,
    fn: TrainerFn = TrainerFn.FITTING,
    nodes: int = 1,
    base: Profile | None = None,
    outcome: Profile | None = None,
    dynamic: Dynamic = "off",
    pool: tuple[Schemes, ...] = (),
) -> tuple[Profile | None, list[Measurement]]:
    """By what a run is planned, and what was to be measured for it."""
    strategy, own = WLBStrategy(dynamic=dynamic), module(CASE)
    standing = SimpleNamespace(state=SimpleNamespace(fn=fn), lightning_module=own)
    own._trainer = standing
    strategy._rank, strategy.num_nodes = mesh.coordinate(0), nodes
    strategy.profile = strategy._base = base
    strategy._lightning_module = own
    strategy.precision_plugin = WLBPrecision("32-true")
    strategy.parallel_devices = [CPU] * 2
    wanted: list[Measurement] = []

    def measure(asked: Measurement) -> Profile | None:
        wanted.append(asked)
        return outcome

    with (
        mock.patch.object(choosing, "agreed_profile", measure),
        mock.patch.object(choosing, "agreed_pool", return_value=pool) as chooses,
        mock.patch.object(choosing, "run_elsewhere"),
        mock.patch.object(choosing, "pool_of"),
        mock.patch.object(WLBStrategy, "root_device", CPU),
    ):
        stages = [range(each, each + 1) for each in range(mesh.stages - 1)]
        stages.append(range(mesh.stages - 1, own.model_shape.layers))
        strategy.executor = SimpleNamespace(pipeline=SimpleNamespace(stages=tuple(stages)))
        strategy.settle_planning(documents_)
        strategy.settle_planning(documents_)
    assert chooses.call_count == (dynamic == "auto")
    assert strategy.dynamic == checked_strategies(dynamic) + pool
    return strategy.profile, wanted


def wants(options: dict[str, Any] | None = None, **run: Any) -> bool:
    return bool(settled(data(CASE, **({"profile": None} | (options or {}))), **run)[1])


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
    assert not wants(fn=TrainerFn.VALIDATING)
    # What lies between the nodes is only known from a profile.
    assert not wants(nodes=2)
    assert not wants(nodes=2, base=measured(1.0))
    network = {"node": Link(1.0, 1e9), "network": Link(2.0, 1e8)}
    base = replace(measured(1.0), links=network, memory_bytes=123)
    _, (found,) = settled(data(CASE, profile=None), nodes=2, base=base)
    assert (found.link, found.network, found.memory_bytes) == (*network.values(), 123)


def test_a_run_that_chooses_no_strategy_is_planned_as_without() -> None:
    dealt = data(CASE, packing="hydraulis", profile=None)
    other, pool = measured(3.0), ((Scheme(0, (1, 1)),),)
    run = {"mesh": Mesh(data=2), "outcome": other, "dynamic": "auto"}
    assert settled(dealt, **run)[0] is None
    assert settled(dealt, **run, pool=pool)[0] == other
    # Its steps on the mesh are planned by times, too.
    assert settled(data(CASE, profile=None), **run | {"mesh": PIPELINE})[0] == other


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
        profile, wanted = settled(documents_, base=base, outcome=other)
        assert (profile, len(wanted)) == (expected, measures)
        assert documents_.state_dict()["profile"] == (other.to_json() if measures else brought)
    documents_ = data(CASE, profile=None)
    documents_.load_state_dict({"planner": None, "profile": replace(base, kernel="cpu").to_json()})
    with mock.patch.object(choosing, "rank_zero_info") as said:
        settled(documents_)
    (line,) = said.call_args.args
    assert line.startswith("WLBStrategy: steps are planned by profile cpu: ")
    assert line.endswith(", as before.")
    documents_ = data(CASE, profile=None)
    assert settled(documents_, base=base)[0] == base
    assert documents_.state_dict() == {"planner": None, "profile": ""}
    assert data(CASE).state_dict() == {"planner": None}


@pytest.mark.parametrize(
    ("name", "memory", "kernel", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, "flash_attn 3", "h100"),
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, "torch (FlashAttention-2)", "h100-fa2"),
        ("NVIDIA H200", 150_000_000_000, "flash_attn 4", "h200"),
        ("NVIDIA H200", 150_000_000_000, "flash_attn 2", "h200-fa2"),
        ("NVIDIA H200", 150_000_000_000, "exact", "h200-fa2"),
        ("NVIDIA GH200 480GB", 100_000_000_000, "flash_attn 3", "h200"),
    ],
)
def test_a_gpu_gets_the_profile_of_its_name_and_kernel_and_its_own_memory(
    name, memory, kernel, profile
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = nearest(name, memory, kernel)
    assert (found.name, found.memory_bytes) == (profile, memory)


@pytest.mark.parametrize(
    ("name", "memory", "profile"),
    [("NVIDIA A100-SXM4-40GB", 42_000_000_000, "h100"), ("NVIDIA B200", 190_000_000_000, "h200")],
)
def test_another_gpu_gets_the_nearest_in_memory_with_a_warning(name, memory, profile) -> None:
    words = f"no device profile of {name}.*analytic profile '{profile}' with {memory // 10**9} GB"
    with pytest.warns(UserWarning, match=words + ".*lightning-wlb profile --output FILE"):
        found = nearest(name, memory, "flash_attn 3")
    assert (found.name, found.memory_bytes) == (profile, memory)


def test_a_cpu_gets_the_measured_one_and_other_devices_none() -> None:
    assert profile_of(torch.device("cpu")) == Profile.load("cpu")
    assert profile_of(torch.device("meta")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_has_one() -> None:
    device = torch.device("cuda", 0)
    found = profile_of(device)
    assert found is not None
    assert found.memory_bytes == torch.cuda.get_device_properties(device).total_memory
