"""The benchmark of meshes goes on where it stopped, and says how far each way is from the best."""

from __future__ import annotations

import json

import pytest

import benchmarks.meshes
from benchmarks.meshes import CHATS, SETTINGS, Setting, main
from lightning_wlb.cost.shape import ModelShape


def test_settings_are_those_of_earlier_estimates() -> None:
    assert len(SETTINGS) == 8
    meshes = list(SETTINGS["7B on 16, 32K CommonCrawl"].meshes(8))
    assert len({mesh.shape for mesh in meshes}) == 34
    assert {mesh.devices for mesh in meshes} == {16}
    assert {mesh.data for mesh in SETTINGS["llama3-8B on 24, 64K Wikipedia"].meshes(8)} == {
        3, 6, 12, 24,
    }  # fmt: skip


def test_every_mesh_is_simulated_once(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        benchmarks.meshes.MODELS, "small", ModelShape(1024, 4, 8, 8, 128, 2816, 8000)
    )
    small = Setting("small", 2, 4096, 16_000, CHATS)
    monkeypatch.setattr(benchmarks.meshes, "SETTINGS", {"small": small})
    output = tmp_path / "meshes.json"
    arguments = ["--settings", "small", "--steps", "1", "--output", str(output)]
    main(arguments)
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first == json.loads(output.read_text())
    for packing in ("best_fit", "auto"):
        part = first["settings"]["small"][packing]
        assert len(part["meshes"]) == part["summary"]["meshes"] == len(list(small.meshes(8)))
        times = [row["step_ms"] for row in part["meshes"].values()]
        assert part["summary"]["best_ms"] == min(times)
        assert part["meshes"][part["search"]["mesh"]]["step_ms"] == part["search"]["step_ms"]
        assert min(part["summary"]["regret_percent"].values()) >= 0
    # Rows that are there are not simulated again.
    monkeypatch.setattr(benchmarks.meshes, "simulated", None)
    main(arguments)
    again = json.loads(output.read_text())
    assert again["settings"]["small"]["auto"]["meshes"] == part["meshes"]
    assert output.with_suffix(".png").stat().st_size > 0
    with pytest.raises(SystemExit):
        main([*arguments[:3], "2", *arguments[4:]])
