"""Which meshes are enumerated, and why others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.legal import Reasons, legal_meshes
from tests.mesh_search.requests import SMALL, request


def meshes(**changes) -> set[tuple[int, ...]]:
    found = legal_meshes(request(**changes), Reasons())
    assert len(set(found)) == len(found)
    return {(*mesh.shape, mesh.virtual_stages) for mesh in found}


def test_four_devices_have_every_product_of_powers_of_two() -> None:
    flat = {each[:4] for each in meshes()}
    assert flat == {
        (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 4, 1, 1), (1, 1, 4, 1),
        (1, 1, 1, 4), (1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2),
    }  # fmt: skip
    virtual = {each[4] for each in meshes() if each[1] == 2}
    assert virtual == {1, 2, 4}
    assert {each[4] for each in meshes() if each[1] == 4} == {1, 2}  # of 8 layers
    assert {each[4] for each in meshes() if each[1] == 1} == {1}


def test_replicas_need_not_be_a_power_of_two() -> None:
    assert {each[0] for each in meshes(devices=24)} == {3, 6, 12, 24}


def test_given_sizes_stay() -> None:
    assert {each[:4] for each in meshes(fixed={"data": 2, "tensor": 1})} == {
        (2, 2, 1, 1),
        (2, 1, 2, 1),
    }
    assert {each[:4] for each in meshes(devices=6, fixed={"context": 3})} == {
        (2, 1, 3, 1), (1, 2, 3, 1), (1, 1, 3, 2),
    }  # fmt: skip
    assert {each[4] for each in meshes(virtual_stages=2) if each[1] > 1} == {2}
    assert {each[4] for each in meshes(schedule="1f1b")} == {1}
    assert {each[4] for each in meshes(schedule="interleaved") if each[1] == 2} == {2, 4}


def reason(mesh: Mesh, **changes) -> str:
    reasons = Reasons()
    fixed = dict(zip(("data", "pipeline", "context", "tensor"), mesh.shape, strict=True))
    assert not legal_meshes(request(mesh.devices, fixed=fixed, **changes), reasons)
    (left,) = reasons.left_out
    assert left.count == 1
    assert left.example.startswith(",".join(map(str, mesh.shape)))
    return left.reason


def test_each_objection_has_its_words() -> None:
    assert reason(Mesh(1, 1, 1, 16)) == "tensor-parallel ranks in different nodes (8 devices each)"
    assert "(6 devices each)" in reason(Mesh(3, 1, 1, 4), devices_per_node=6)
    assert reason(Mesh(1, 16), virtual_stages=1) == "more pipeline stages than the 8 layers"
    odd = replace(SMALL, heads=15, kv_heads=15)
    assert "does not divide the model's heads=15" in reason(Mesh(tensor=2), shape=odd)
    shared = replace(SMALL, heads=24, kv_heads=3)
    assert "kv_heads=3 do not divide" in reason(Mesh(tensor=2), shape=shared)
    assert "context" in reason(Mesh(context=32), sharding="heads")


@given(st.integers(1, 300), st.integers(1, 8))
def test_every_mesh_uses_all_devices_and_keeps_tensors_in_a_node(devices: int, node: int) -> None:
    for mesh in legal_meshes(request(devices, devices_per_node=node), Reasons()):
        assert mesh.devices == devices
        assert mesh.stages <= SMALL.layers
        groups = mesh.groups("tensor") // node
        assert (groups == groups[:, :1]).all()


@pytest.mark.parametrize("devices", [1024, 16_384])
def test_counts_add_up(devices: int) -> None:
    reasons = Reasons()
    found = legal_meshes(request(devices), reasons)
    left = sum(each.count for each in reasons.left_out)
    powers = devices.bit_length() - 1
    flat = (powers + 1) * (powers + 2) * (powers + 3) // 6
    without_pipeline = (powers + 1) * (powers + 2) // 2
    assert len(found) + left == 3 * (flat - without_pipeline) + without_pipeline
