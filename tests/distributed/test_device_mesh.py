from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_wlb.distributed.device_mesh import (
    data_context,
    device_mesh,
    is_settled,
    resolve_mesh,
)
from lightning_wlb.mesh import AXES, Mesh
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("world_size", "asked", "expected"),
    [
        (8, ("auto", 2, 1, 2), (2, 2, 1, 2)),
        (8, (2, 2, 1, 2), (2, 2, 1, 2)),
        (8, (1, 1, 2, "auto"), (1, 1, 2, 4)),
        # Only the first "auto" takes what is left.
        (8, ("auto", "auto", 2, "auto"), (4, 1, 2, 1)),
    ],
)
def test_the_first_auto_takes_the_ranks_that_are_left(world_size, asked, expected):
    assert resolve_mesh(world_size, *asked) == Mesh(*expected)


@pytest.mark.parametrize(
    ("world_size", "asked", "needs"),
    [
        (8, (2, 2, 1, 1), "a multiple of 4 ranks and exactly that many"),
        (8, ("auto", 3, 1, 1), "a multiple of 3 ranks"),
    ],
)
def test_a_product_that_is_not_the_world_size_is_answered(world_size, asked, needs):
    with pytest.raises(MisconfigurationException) as error:
        resolve_mesh(world_size, *asked)
    text = str(error.value)
    shown = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, asked, strict=True))
    assert f"The mesh {shown} needs {needs}, but the Trainer runs {world_size}" in text
    assert "Change devices or num_nodes" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("world_size", "asked", "settled"),
    [
        (1, ("auto",) * 4, True),
        (2, ("auto",) * 4, False),
        (4, ("auto", 4, "auto", "auto"), True),  # nothing is left
        (4, ("auto", 2, "auto", 1), False),
        (4, ("auto", 1, 1, 1), True),  # nor any choice
        (8, (2, 2, 2, 1), True),
    ],
)
def test_there_is_nothing_to_choose_where_one_mesh_alone_is_as_asked(world_size, asked, settled):
    assert is_settled(world_size, asked) == settled


@pytest.mark.parametrize("size", [0, 1.5, "two", None, True])
def test_a_size_is_a_positive_whole_number_or_auto(size):
    with pytest.raises(MisconfigurationException, match=r"context_parallel_size=.*>= 1 or"):
        resolve_mesh(4, "auto", 1, size, 1)


def test_virtual_stages_go_into_the_mesh_and_take_no_ranks():
    assert resolve_mesh(8, "auto", 4, virtual_stages=3) == Mesh(2, 4, virtual_stages=3)


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
