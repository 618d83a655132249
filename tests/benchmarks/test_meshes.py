"""The benchmark of meshes goes on where it stopped, and says how far each way is from the best."""

from __future__ import annotations

from benchmarks.meshes import SETTINGS


def test_settings_are_those_of_earlier_estimates() -> None:
    assert len(SETTINGS) == 8
    meshes = list(SETTINGS["7B on 16, 32K CommonCrawl"].meshes(8))
    assert len({mesh.shape for mesh in meshes}) == 34
    assert {mesh.devices for mesh in meshes} == {16}
    assert {mesh.data for mesh in SETTINGS["llama3-8B on 24, 64K Wikipedia"].meshes(8)} == {
        3, 6, 12, 24,
    }  # fmt: skip
