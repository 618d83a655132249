"""The search: against all meshes, under fixed sizes, and where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search import search
from lightning_wlb.mesh_search.evaluate import Evaluation, MeshChoice, evaluate
from lightning_wlb.mesh_search.search import choose_mesh, legal_meshes
from tests.mesh_search.requests import SMALL, request

ASKED = request(micro_batches=2, steps=1, schedule="1f1b")


@pytest.fixture(scope="module")
def found() -> MeshChoice:
    return choose_mesh(ASKED)


def test_it_finds_the_best_of_all_meshes(found: MeshChoice) -> None:
    every = [evaluate(ASKED, mesh) for mesh in legal_meshes(ASKED)]
    best = min(each.row.steps_ns for each in every if each.fits)
    assert found.best.steps_ns == best


def test_rows_come_out_the_same_when_their_mesh_is_given(found: MeshChoice) -> None:
    for row in found.rows:
        assert evaluate(ASKED, row.mesh).row == row


def test_rows_are_ordered_and_every_mesh_is_accounted_for(found: MeshChoice) -> None:
    times = [row.steps_ns for row in found.rows]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= search.CLOSE * min(times)
    left = sum(each.count for each in found.left_out)
    reasons: search.LeftOutMeshes = {}
    legal = legal_meshes(ASKED, reasons)
    illegal = sum(map(len, reasons.values()))
    assert len(found.rows) + left == len(legal) + illegal


def test_of_meshes_about_as_fast_the_one_with_least_communication_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "CLOSE", 100)
    first, *others = choose_mesh(ASKED).rows
    assert first.communication_ns < min(row.communication_ns for row in others)
    assert first.steps_ns > others[0].steps_ns


def test_progress_is_told(found: MeshChoice) -> None:
    told: list[tuple[str, int, int]] = []
    again = choose_mesh(ASKED, progress=lambda *each: told.append(each))
    assert again == found
    assert list(dict.fromkeys(what for what, _, _ in told)) == [
        "estimating meshes", "simulating meshes",
    ]  # fmt: skip
    assert all(0 <= done < whole for _, done, whole in told)


def test_few_meshes_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SAMPLED_MESHES", 3)
    found = choose_mesh(ASKED)
    left = {each.reason: each.count for each in found.left_out}
    assert len(found.rows) + left.pop(search.BEHIND, 0) == 3
    ((reason, count),) = left.items()
    assert "closed form" in reason
    assert count == len(legal_meshes(ASKED)) - 3 > 0


def test_meshes_that_fall_behind_are_not_simulated_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, ran = replace(ASKED, steps=3), []

    class Counted(Evaluation):
        def go_on(self, steps: int) -> None:
            super().go_on(steps)
            ran.append((self.mesh, steps))

    monkeypatch.setattr(search, "Evaluation", Counted)
    found = choose_mesh(asked)
    to_the_end = {mesh for mesh, steps in ran if steps == asked.steps}
    assert to_the_end == {row.mesh for row in found.rows}
    assert len(to_the_end) < len({mesh for mesh, _ in ran})
    assert found == choose_mesh(asked)
    monkeypatch.setattr(search, "NOISE", -1.0)  # all are behind, but two go on
    assert choose_mesh(asked).rows[:2] == found.rows[:2]
    # Nobody is behind who could be behind by chance: then the end is the same.
    monkeypatch.setattr(search, "NOISE", 1.0)
    everyone = choose_mesh(asked)
    assert len(everyone.rows) > len(found.rows)
    assert everyone.best == found.best


def with_memory(gigabytes: float) -> Profile:
    return replace(ASKED.profile, memory_bytes=int(gigabytes * 1e9))


def test_where_nothing_fits_the_smallest_number_of_devices_is_named() -> None:
    asked = replace(ASKED, devices=1, profile=with_memory(1.2))
    with pytest.raises(ValueError, match="No mesh of 1 devices") as caught:
        choose_mesh(asked)
    text = str(caught.value)
    assert "parameters, gradients and optimizer state do not fit: 1, as 1,1,1,1" in text
    devices = int(text.split("With ")[1].split(" devices")[0])
    assert devices in (2, 4, 8)
    assert choose_mesh(replace(asked, devices=devices)).best.peak_bytes <= asked.usable_bytes
    with pytest.raises(ValueError, match=f"With {devices} devices there is one"):
        choose_mesh(replace(asked, devices=devices // 2))


def test_more_devices_do_not_help_sizes_that_are_all_given() -> None:
    fixed = {"data": 1, "pipeline": 1, "context": 1, "tensor": 1}
    with pytest.raises(ValueError, match="More devices alone do not help"):
        choose_mesh(request(devices=1, fixed=fixed, profile=with_memory(0.1)))


def test_a_profile_without_network_says_so() -> None:
    alone = replace(ASKED.profile, links={"node": ASKED.profile.links["node"]})
    with pytest.raises(ValueError, match="no link between nodes"):
        choose_mesh(request(devices=16, profile=alone))


def test_given_sizes_are_kept() -> None:
    found = choose_mesh(replace(ASKED, fixed={"pipeline": 2, "tensor": 1}))
    assert {row.mesh.shape for row in found.rows} == {(2, 2, 1, 1), (1, 2, 2, 1)}
    (one,) = choose_mesh(replace(ASKED, fixed={"data": 1, "context": 4})).rows
    assert one.mesh == Mesh(1, 1, 4)


def test_a_mesh_that_fits_is_found_where_the_best_ones_do_not_after_all(
    found: MeshChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = found.rows[-1].mesh

    class Fits(Evaluation):
        def go_on(self, steps: int) -> None:
            super().go_on(steps)
            self.fits = self.mesh == only

    monkeypatch.setattr(search, "Evaluation", Fits)
    for first in (12, 1):  # that fits among the first, or after them
        monkeypatch.setattr(search, "SAMPLED_MESHES", first)
        monkeypatch.setattr(search, "MORE_SAMPLED", 12)
        assert choose_mesh(ASKED).best.mesh == only


def meshes(**changes) -> set[tuple[int, ...]]:
    found = legal_meshes(request(**changes))
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


def test_sizes_are_every_divisor_that_model_and_nodes_allow() -> None:
    assert {each[0] for each in meshes(devices=24)} == {1, 2, 3, 4, 6, 8, 12, 24}
    assert {each[1] for each in meshes(devices=7)} == {1, 7}
    assert {each[3] for each in meshes(devices=24)} == {1, 2, 4, 8}


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
    reasons: search.LeftOutMeshes = {}
    fixed = dict(zip(("data", "pipeline", "context", "tensor"), mesh.shape, strict=True))
    assert not legal_meshes(request(mesh.devices, fixed=fixed, **changes), reasons)
    (((words, (left,)),)) = reasons.items()
    assert left.shape == mesh.shape
    return words


def test_each_objection_has_its_words() -> None:
    assert reason(Mesh(1, 1, 1, 16)) == "tensor-parallel ranks in different nodes (8 devices each)"
    assert "(6 devices each)" in reason(Mesh(3, 1, 1, 4), devices_per_node=6)
    assert reason(Mesh(1, 16), virtual_stages=1) == "more pipeline stages than the 8 layers"
    odd = replace(SMALL, heads=15, kv_heads=15)
    assert "does not divide heads=15" in reason(Mesh(tensor=2), shape=odd)
    shared = replace(SMALL, heads=24, kv_heads=3)
    assert "kv_heads=3 do not divide" in reason(Mesh(tensor=2), shape=shared)


@given(st.integers(1, 300), st.integers(1, 8))
def test_every_mesh_uses_all_devices_and_keeps_tensors_in_a_node(devices: int, node: int) -> None:
    for mesh in legal_meshes(request(devices, devices_per_node=node)):
        assert mesh.devices == devices
        assert mesh.stages <= SMALL.layers
        groups = mesh.groups("tensor") // node
        assert (groups == groups[:, :1]).all()


@pytest.mark.parametrize("devices", [1024, 16_384])
def test_counts_add_up(devices: int) -> None:
    reasons: search.LeftOutMeshes = {}
    found = legal_meshes(request(devices), reasons)
    left = sum(map(len, reasons.values()))
    powers = devices.bit_length() - 1
    flat = (powers + 1) * (powers + 2) * (powers + 3) // 6
    without_pipeline = (powers + 1) * (powers + 2) // 2
    assert len(found) + left == 3 * (flat - without_pipeline) + without_pipeline


def test_where_no_terminal_shows_a_bar_a_line_says_what_is_done(capsys) -> None:
    with search.progress_bar("Simulating all") as tell:
        tell("meshes", 1, 2)
    takes = "which takes seconds for 16 of them, and one to three minutes for 1,024"
    assert capsys.readouterr().err == f"Simulating all, {takes}.\n"
