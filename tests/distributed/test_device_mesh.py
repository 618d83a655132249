from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_wlb.distributed.device_mesh import data_context, device_mesh
from lightning_wlb.mesh import AXES, Mesh
from tests.ranks import run_ranks


def test_device_mesh_of_a_thousand_ranks_agrees_with_the_sizes():
    rank = 517
    mesh = Mesh(data=8, pipeline=4, context=4, tensor=8)
    at = mesh.coordinate(rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    try:
        devices = device_mesh(mesh, "cpu")
        assert devices.mesh_dim_names == AXES
        assert tuple(devices.get_coordinate()) == (at.data, at.pipeline, at.context, at.tensor)
        for axis in AXES:
            assert tuple(devices[axis].mesh.tolist()) == at.group(axis)
        # FSDP sums over replicas and context ranks, never over stages or tensor ranks.
        assert tuple(data_context(devices).mesh.tolist()) == at.group("data", "context")
    finally:
        dist.destroy_process_group()


def timeouts(rank: int) -> list[timedelta]:
    mesh = device_mesh(Mesh(data=2, pipeline=2), "cpu", timedelta(seconds=7))
    groups = [
        mesh["data"].get_group(),
        mesh["pipeline"].get_group(),
        data_context(mesh).get_group(),
    ]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_axis_waits_as_long_as_it_was_told():
    assert run_ranks(timeouts, 4) == [[timedelta(seconds=7)] * 3] * 4
