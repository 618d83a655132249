import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_wlb.strategy.mesh import AXES, MeshSizes, data_context
from tests.ranks import run_ranks

sizes = st.integers(1, 5)
meshes = st.builds(MeshSizes, sizes, sizes, sizes, sizes)


@pytest.mark.parametrize(
    ("world_size", "asked", "expected"),
    [
        (1, ("auto", 1, 1, 1), (1, 1, 1, 1)),
        (8, ("auto", 1, 1, 1), (8, 1, 1, 1)),
        (8, ("auto", 2, 1, 2), (2, 2, 1, 2)),
        (8, (2, 2, 1, 2), (2, 2, 1, 2)),
        (8, (1, "auto", 2, 1), (1, 4, 2, 1)),
        (8, (1, 1, 2, "auto"), (1, 1, 2, 4)),
        # Only the first "auto" takes what is left.
        (8, ("auto", "auto", 2, "auto"), (4, 1, 2, 1)),
        (8, (2, 4, "auto", 1), (2, 4, 1, 1)),
    ],
)
def test_the_first_auto_takes_the_ranks_that_are_left(world_size, asked, expected):
    assert MeshSizes.resolve(world_size, *asked) == MeshSizes(*expected)


@pytest.mark.parametrize(
    ("world_size", "asked", "needs"),
    [
        (8, (2, 2, 1, 1), "a multiple of 4 ranks and exactly that many"),
        (2, (2, 2, 1, 1), "a multiple of 4 ranks and exactly that many"),
        (8, ("auto", 3, 1, 1), "a multiple of 3 ranks"),
        (2, ("auto", 2, 1, 2), "a multiple of 4 ranks"),
    ],
)
def test_a_product_that_is_not_the_world_size_is_answered(world_size, asked, needs):
    with pytest.raises(MisconfigurationException) as error:
        MeshSizes.resolve(world_size, *asked)
    text = str(error.value)
    shown = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, asked, strict=True))
    assert f"The mesh {shown} needs {needs}, but the Trainer runs {world_size}" in text
    assert "Change devices or num_nodes" in text
    assert "\n" not in text


@pytest.mark.parametrize("size", [0, -2, 1.5, "two", None, True])
def test_a_size_is_a_positive_whole_number_or_auto(size):
    with pytest.raises(MisconfigurationException, match=r"context_parallel_size=.*>= 1 or"):
        MeshSizes.resolve(4, "auto", 1, size, 1)


@given(meshes)
def test_rank_is_the_inverse_of_coordinate(mesh):
    for rank in range(mesh.world_size):
        assert mesh.rank(*mesh.coordinate(rank)) == rank


@given(meshes)
def test_data_is_outermost_and_tensor_innermost(mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    # Lexicographic order of (data, pipeline, context, tensor), with no gap.
    assert coordinates == list(itertools.product(*(range(getattr(mesh, axis)) for axis in AXES)))


@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_device_mesh_of_a_thousand_ranks_agrees_with_the_sizes(rank):
    mesh = MeshSizes(data=8, pipeline=4, context=4, tensor=8)
    assert mesh.world_size == 1024
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    try:
        devices = mesh.device_mesh("cpu")
        assert devices.mesh_dim_names == AXES
        assert tuple(devices.get_coordinate()) == mesh.coordinate(rank)
        data, pipeline, context, tensor = mesh.coordinate(rank)
        assert devices["tensor"].mesh.tolist() == [
            mesh.rank(data, pipeline, context, other) for other in range(8)
        ]
        assert devices["pipeline"].mesh.tolist() == [
            mesh.rank(data, other, context, tensor) for other in range(4)
        ]
        # FSDP sums over replicas and context ranks, never over stages or tensor ranks.
        assert data_context(devices).mesh.tolist() == [
            mesh.rank(replica, pipeline, other, tensor)
            for replica, other in itertools.product(range(8), range(4))
        ]
    finally:
        dist.destroy_process_group()


def timeouts(rank: int) -> list[timedelta]:
    mesh = MeshSizes(data=2, pipeline=2).device_mesh("cpu", timedelta(seconds=7))
    groups = [
        mesh["data"].get_group(),
        mesh["pipeline"].get_group(),
        data_context(mesh).get_group(),
    ]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_axis_waits_as_long_as_it_was_told():
    assert run_ranks(timeouts, 4) == [[timedelta(seconds=7)] * 3] * 4
