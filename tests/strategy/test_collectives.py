"""Communicators of meshes of 1,024 ranks, on torch's fake backend: a few calls of each rank."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan
from lightning_wlb.strategy.process_groups import MergedGroups, own_group, pipeline_groups
from tests.ranks import run_ranks

MESH = Mesh(data=32, pipeline=8, context=2, tensor=2)
AT = Rank(MESH, data=21, pipeline=7)  # global rank 700


@pytest.fixture
def calls(monkeypatch):
    """The ranks of every communicator that this rank makes."""
    made = []
    original = dist.new_group

    def new_group(ranks, *args, **kwargs):
        made.append(list(ranks))
        return original(ranks, *args, **kwargs)

    monkeypatch.setattr(dist, "new_group", new_group)
    dist.init_process_group("fake", store=FakeStore(), rank=AT.index, world_size=MESH.devices)
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize("ring", [False, True])
def test_a_rank_makes_one_communicator_for_each_channel(calls, ring):
    mesh = replace(MESH, virtual_stages=2 if ring else 1)
    groups = pipeline_groups(replace(AT, mesh=mesh), None)
    mine = [MESH.rank_of(21, place, 0, 0) for place in range(8)]
    assert calls == [mine] * (4 if ring else 2)
    assert len({id(group) for group in groups.values()}) == len(calls)
    for group in groups.values():
        assert dist.get_process_group_ranks(group) == mine


def plan_shared_by(*sizes: int) -> StepPlan:
    """Replica 0 shares micro-batches with so many; nobody else's matter here."""
    groups = tuple(MicroBatch((n,), "hybrid", 1, tuple(range(s))) for n, s in enumerate(sizes))
    slices = tuple(Slice(number, 0, 0, 1) for number in range(len(sizes)))
    return StepPlan(0, 0, (ReplicaPlan(slices, groups, groups),), (), 0, 1, 1, 1)


def test_a_rank_makes_one_communicator_for_each_size_of_merged_set(calls):
    merged = MergedGroups(AT, None)
    groups = merged.prepare(plan_shared_by(4, 2))
    assert sorted(groups) == [2, 4]
    pair, four = (
        [
            MESH.rank_of(data, 7, context, 0)
            for data in range(first, first + count)
            for context in range(2)
        ]
        for first, count in ((20, 2), (20, 4))
    )
    assert calls == [pair, four]
    assert merged.prepare(plan_shared_by(2, 4, 2)) == groups
    assert len(calls) == 2


def sums(rank: int) -> list[int]:
    """What rank + 1 adds up to over its pair, over its half, and where it is in no set."""
    results = []
    for sets in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1]]):
        group = own_group(sets, rank, None)
        value = torch.tensor([rank + 1])
        if group is not None:
            dist.all_reduce(value, group=group)
        results.append(int(value))
    return results


def test_members_talk_to_each_other_only():
    assert run_ranks(sums, 4) == [[3, 4, 3], [3, 6, 3], [7, 4, 3], [7, 6, 4]]
