"""The mesh and its ranks: the order of ranks, groups, and wrong sizes and places."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.mesh import AXES, ONE_DEVICE, Mesh, Rank

sizes = st.integers(1, 5)
meshes = st.builds(Mesh, sizes, sizes, sizes, sizes, sizes)


def test_sizes_of_a_mesh() -> None:
    mesh = Mesh(data=2, pipeline=4, context=3, tensor=5, virtual_stages=6)
    assert mesh.shape == (2, 4, 3, 5)
    assert mesh.devices == 120
    assert mesh.stages == 24
    assert str(mesh) == "data 2 × pipeline 4 × context 3 × tensor 5"
    assert Mesh(np.int64(2)) == Mesh(2)
    assert type(Mesh(np.int64(2)).data) is int
    assert (ONE_DEVICE.devices, ONE_DEVICE.stages) == (1, 1)


@pytest.mark.parametrize("name", [*AXES, "virtual_stages"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"mesh: {name}=0, .* Give a whole number of at least 1"):
        Mesh(**{name: 0})
    with pytest.raises(ValueError, match=f"mesh: {name}=True is of type bool"):
        Mesh(**{name: True})


@given(meshes)
def test_index_is_the_inverse_of_coordinate(mesh: Mesh) -> None:
    for index in range(mesh.devices):
        rank = mesh.coordinate(index)
        assert rank.mesh is mesh
        assert rank.index == index


@given(meshes)
def test_data_is_outermost_and_tensor_innermost(mesh: Mesh) -> None:
    ranks = [mesh.coordinate(index) for index in range(mesh.devices)]
    # Lexicographic order of (data, pipeline, context, tensor), with no gap.
    assert [(rank.data, rank.pipeline, rank.context, rank.tensor) for rank in ranks] == list(
        itertools.product(*map(range, mesh.shape))
    )


def test_groups_follow_the_order_of_ranks() -> None:
    mesh = Mesh(data=2, pipeline=2, context=2, tensor=2)
    assert mesh.groups("tensor")[0].tolist() == [0, 1]
    assert mesh.groups("context")[0].tolist() == [0, 2]
    assert mesh.groups("pipeline")[0].tolist() == [0, 4]
    assert mesh.groups("data", "context")[0].tolist() == [0, 2, 8, 10]
    assert mesh.groups("data", "context").dtype == np.int64
    assert Rank(mesh, data=1, tensor=1).group("pipeline") == (9, 13)
    assert Rank(mesh, pipeline=1).group("data", "context") == (4, 6, 12, 14)


@given(meshes, st.lists(st.sampled_from(AXES), unique=True))
def test_groups_partition_the_ranks(mesh: Mesh, axes: list[str]) -> None:
    groups = mesh.groups(*axes)
    assert sorted(groups.ravel().tolist()) == list(range(mesh.devices))
    others = [axis for axis in AXES if axis not in axes]
    for group in groups.tolist():
        ranks = [mesh.coordinate(index) for index in group]
        # The axes count up in the order asked for, the others stand still.
        assert [tuple(getattr(rank, axis) for axis in axes) for rank in ranks] == list(
            itertools.product(*(range(getattr(mesh, axis)) for axis in axes))
        )
        assert len({tuple(getattr(rank, axis) for axis in others) for rank in ranks}) == 1
        assert ranks[-1].group(*axes) == tuple(group)


@given(meshes)
def test_only_the_ends_of_a_pipeline_hold_the_ends_of_the_model(mesh: Mesh) -> None:
    ranks = [Rank(mesh, pipeline=place) for place in range(mesh.pipeline)]
    assert [rank.pipeline for rank in ranks if rank.first_stage] == [0]
    # Stage s is on place s % pipeline.
    last = (mesh.stages - 1) % mesh.pipeline
    assert [rank.pipeline for rank in ranks if rank.last_stage] == [last]


def test_places_outside_of_the_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data=2 is not in \[0, 2\): .* the mesh data 2 ×"):
        Rank(Mesh(data=2), data=2)
    with pytest.raises(ValueError, match=r"context=-1 is not in \[0, 1\)"):
        Rank(context=-1)
    with pytest.raises(ValueError, match=r"tensor=0.5 is of type float"):
        Rank(tensor=0.5)  # type: ignore[arg-type]
    for index in (-1, 6):
        with pytest.raises(ValueError, match=rf"data={index // 3} is not in \[0, 2\)"):
            Mesh(data=2, tensor=3).coordinate(index)
