"""Process groups: made once in a process, by few calls of each rank, and connected before use."""

import os
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.distributed_c10d import _world as process_groups
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_wlb.cost.profile import Profile
from lightning_wlb.distributed.process_groups import (
    MergedGroups,
    data_context,
    device_mesh,
    mesh_groups,
    pipeline_groups,
)
from lightning_wlb.mesh import AXES, Mesh, Rank
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Scheme, Slice, StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.heterogeneous.fixed_choices import take_in_turn
from tests.ranks import free_port, run_ranks
from tests.strategy.harness import SMALL, SMALL_TIED, Case, data, module, trainer

CASE, TIED = SMALL, SMALL_TIED
HELD_OUT = {"validation_documents": 5}


ELSEWHERE = [[Scheme(0, (2,)), Scheme(1, (2,))], [Scheme(0, (2,), context=2)]]


def several_trainers_elsewhere() -> None:
    """Several runs whose steps leave the mesh, the last one with another time-out."""
    take_in_turn(list(map(tuple, ELSEWHERE)))
    case, counts = Case("slim", layers=2), []
    profile = replace(Profile.load("cpu"), devices_per_node=2)
    first, seconds = module(case), timedelta(seconds=77)
    for model, options in ((first, {}), (module(case), {}), (first, {"timeout": seconds})):
        strategy = WLBStrategy(1, 2, 1, 1, dynamic=ELSEWHERE, **options)
        trainer(strategy, 2, max_steps=2).fit(model, data(case, profile=profile))
        counts.append(len(process_groups.pg_map))
    assert len(set(counts)) == 1, counts
    assert strategy.executor is not None
    for plan_strategy in map(tuple, ELSEWHERE):
        own, linked = strategy.executor.heterogeneous._made[plan_strategy]
        groups = [linked.group, own._of_pipeline.context]
        for group in filter(None, groups):
            assert group._get_backend(torch.device("cpu")).options._timeout == seconds


def several_trainers(rank: int) -> dict[str, int]:
    """Process groups after each of several runs in one process."""
    counts = {}

    def run(name: str, verb: str, model, mesh=(1, 2, 1, 1), **options) -> WLBStrategy:
        strategy = WLBStrategy(*mesh, **options)
        documents = data(CASE, **HELD_OUT, test_documents=data(CASE)._stores()[0])
        getattr(trainer(strategy, 2, max_steps=1), verb)(model, documents)
        counts[name] = len(process_groups.pg_map)
        return strategy

    model = module(CASE)
    run("first", "fit", model)
    run("the model again", "fit", model)
    run("validation", "validate", model)
    run("test", "test", model)
    run("another model", "fit", module(TIED))
    patient = run("patient", "fit", model, timeout=timedelta(seconds=77))
    groups = [patient.mesh_groups.mesh["data"].get_group(), *patient.mesh_groups.channels.values()]
    for group in groups:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    run("as it comes", "fit", model)
    for group in groups:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=10)
    wide = run("another mesh", "fit", module(CASE), (1, 1, 2, 1)).mesh_groups
    # torch gives the axes the default group there.
    assert wide.mesh.get_group("context") is dist.group.WORLD
    assert wide.parameters is not dist.group.WORLD
    assert wide.parameters.size() == 2
    run("the first mesh", "fit", module(CASE))
    several_trainers_elsewhere()
    return counts


def test_a_second_trainer_makes_no_process_groups():
    for counts in run_ranks(several_trainers, 2, process_group=False):
        first = counts["first"]
        same = ("the model again", "validation", "test", "another model", "patient", "as it comes")
        assert {counts[name] for name in same} == {first}
        assert first < counts["another mesh"] == counts["the first mesh"]


def after_the_process_group(rank: int) -> None:
    model = module(CASE)
    trainer(WLBStrategy(), 1, max_steps=1).fit(model, data(CASE))
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(free_port())
    with pytest.raises(
        MisconfigurationException, match=r"was destroyed. Give this one a new module"
    ):
        trainer(WLBStrategy(), 1, max_steps=1).fit(model, data(CASE))
    # The process is none the worse for it.
    trainer(WLBStrategy(), 1, max_steps=1).fit(module(CASE), data(CASE))


def test_process_groups_end_with_the_process_group():
    run_ranks(after_the_process_group, 1, process_group=False)


class Log:
    """What was called on which group, and between whom, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, dist.ProcessGroup, int]] = []
        for name in ("send", "recv", "all_reduce", "batch_isend_irecv"):
            monkeypatch.setattr(dist, name, self._noting(name, getattr(dist, name)))

    def _noting(self, name, function):
        def call(*args, **kwargs):
            if name == "batch_isend_irecv":
                self.calls += [(name, each.group, each.peer) for each in args[0]]
            elif name == "all_reduce":
                self.calls.append((name, kwargs.get("group"), -1))
            else:
                self.calls.append((name, args[2], args[1]))
            return function(*args, **kwargs)

        return call


def connections(rank: int, ring: bool) -> tuple[list[str], dict]:
    """What a rank of three calls when process groups are made."""
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        place = Mesh(pipeline=3, virtual_stages=2 if ring else 1).coordinate(rank)
        made = mesh_groups(place, torch.device("cpu"), None)
        again = mesh_groups(place, torch.device("cpu"), None)
    assert made is again
    assert log.calls[0][:2] == ("all_reduce", made.mesh["pipeline"].get_group())
    messages = {
        channel: [(name, peer) for name, used, peer in log.calls if used is group]
        for channel, group in made.channels.items()
    }
    assert sum(map(len, messages.values())) == len(log.calls) - 1
    return [name for name, _, _ in log.calls], messages


@pytest.mark.parametrize("ring", [False, True])
def test_each_channel_has_carried_a_message_between_all_who_will_use_it(ring):
    ranks = run_ranks(connections, 3, ring)
    sent = {
        channel: {
            (rank, peer)
            for rank, (_, messages) in enumerate(ranks)
            for name, peer in messages[channel]
            if name == "send"
        }
        for channel in ranks[0][1]
    }
    want = {("F", False): {(0, 1), (1, 2)}, ("B", False): {(2, 1), (1, 0)}}
    if ring:
        want |= {("F", True): {(2, 0)}, ("B", True): {(0, 2)}}
    assert sent == want
    # Whoever passes a message on has it: no two ranks send to each other first.
    for channel in want:
        assert [name for name, _ in ranks[1][1][channel]] in (["recv", "send"], [])


def tied_ends(rank: int) -> list[str]:
    """What a rank of two pipelines calls on the axis over which tied gradients are swapped."""
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        strategy = WLBStrategy(2, 2)
        trainer(strategy, 4, max_steps=1, gradient_clip_val=None).fit(module(TIED), data(TIED))
    axis = strategy.mesh_groups.mesh["pipeline"].get_group()
    return [name for name, group, _ in log.calls if group is axis]


def test_a_pipeline_has_met_in_a_collective_before_two_of_it_swap_tied_gradients():
    for calls in run_ranks(tied_ends, 4, process_group=False):
        assert calls == ["all_reduce", "batch_isend_irecv", "batch_isend_irecv"]


# 1,024 ranks, on torch's fake backend.
MESH = Mesh(data=32, pipeline=8, context=2, tensor=2)
RANK = Rank(MESH, data=21, pipeline=7)  # global rank 700


@pytest.fixture
def calls(monkeypatch):
    """The ranks of every process group that this rank makes."""
    made = []
    original = dist.new_group

    def new_group(ranks, *args, **kwargs):
        made.append(list(ranks))
        return original(ranks, *args, **kwargs)

    monkeypatch.setattr(dist, "new_group", new_group)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK.index, world_size=MESH.devices)
    yield made
    dist.destroy_process_group()


def test_the_device_mesh_of_a_thousand_ranks_agrees_with_the_sizes(calls):
    devices, at = device_mesh(MESH, "cpu"), RANK
    assert devices.mesh_dim_names == AXES
    assert tuple(devices.get_coordinate()) == (at.data, at.pipeline, at.context, at.tensor)
    for axis in AXES:
        assert tuple(devices[axis].mesh.tolist()) == at.group(axis)
    # FSDP sums over replicas and context ranks, never over stages or tensor ranks.
    assert tuple(data_context(devices).mesh.tolist()) == at.group("data", "context")


@pytest.mark.parametrize("ring", [False, True])
def test_a_rank_makes_one_process_group_for_each_channel(calls, ring):
    mesh = replace(MESH, virtual_stages=2 if ring else 1)
    groups = pipeline_groups(replace(RANK, mesh=mesh))
    mine = [Rank(MESH, 21, place, 0, 0).index for place in range(8)]
    assert calls == [mine] * (4 if ring else 2)
    assert len({id(group) for group in groups.values()}) == len(calls)
    for group in groups.values():
        assert dist.get_process_group_ranks(group) == mine


def plan_shared_by(*sizes: int) -> StepPlan:
    """Replica 0 shares micro-batches with so many; nobody else's matter here."""
    groups = tuple(MicroBatch((n,), "hybrid", 1, tuple(range(s))) for n, s in enumerate(sizes))
    slices = tuple(Slice(number, 0, 0, 1) for number in range(len(sizes)))
    return StepPlan(0, 0, (ReplicaPlan(slices, groups),), (), 0, 1, 1, 1)


def test_a_rank_makes_one_process_group_for_each_size_of_merged_set(calls):
    merged = MergedGroups([np.arange(MESH.devices).reshape(MESH.shape)], RANK.index)
    groups = merged.prepare(plan_shared_by(4, 2))
    assert sorted(groups) == [2, 4]
    pair, four = (
        [
            Rank(MESH, data, 7, context, 0).index
            for data in range(first, first + count)
            for context in range(2)
        ]
        for first, count in ((20, 2), (20, 4))
    )
    assert calls == [pair, four]
    assert merged.prepare(plan_shared_by(2, 4, 2)) == groups
    assert len(calls) == 2


def test_a_rank_that_no_merged_set_holds_joins_its_making_once(calls):
    """The others make theirs once, and all ranks have to make as many."""
    merged = MergedGroups([np.arange(2).reshape(2, 1, 1, 1)], RANK.index)
    for _ in range(2):
        assert merged.prepare(plan_shared_by(2)) == {}
        assert calls == [[RANK.index]]
