"""Benchmarks that take many seconds even in their smallest run: they run, and end with JSON."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.__main__ import main as gpu_part
from benchmarks.gpu.papers import summary
from lightning_wlb.cost.profile import Profile
from tests.ranks import run_ranks

pytestmark = pytest.mark.soak


def test_loading(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from benchmarks.loading import main

    main(["--width", "64", "--layers", "4", "--meshes", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["model"] for row in result["rows"]] == ["llama", "mixtral"]
    for row in result["rows"]:
        # Two bytes are read for four that are held.
        assert row["read_mb"] == pytest.approx(row["share_mb"] / 2, abs=0.1)
    assert result["built_without_memory"]["parameters_b"] == 70.6
    assert result["built_without_memory"]["process_mb"] < 1024


def run_parts(rank: int, folder: str) -> list[int]:
    names = ("profile", "papers", "train", "trace")
    options = ["--device", "cpu", "--small", "--output", folder]
    return [gpu_part([*options, "--part", name]) for name in names]


def test_parts_of_the_gpu_hour_in_tiny_sizes_on_a_cpu(tmp_path: Path) -> None:
    (statuses,) = run_ranks(run_parts, 1, str(tmp_path), process_group=False)
    assert statuses == [0, 0, 0, 0]
    found = {
        name: json.loads((tmp_path / f"gpu_{name}.json").read_text())
        for name in PARTS
        if name != "right"
    }
    assert all(each["left_out"] == [] for each in found.values())
    assert Profile.load(str(tmp_path / found["profile"]["rows"]["tiny"]["file"])).measured
    rows = found["train"]["rows"]
    assert list(rows) == ["profile", "original, round 1", "auto, round 1"]
    for row in (rows["original, round 1"], rows["auto, round 1"]):
        assert row["profile"] == "measured-trained"
        (_, second) = row["steps"]
        assert second["tokens_per_second"] == second["tokens"] / second["seconds"]
    assert found["train"]["summary"]["auto_over_original"] > 0
    assert set(found["papers"]["summary"]) == set(summary({}))
    assert (tmp_path / "gpu_papers.png").stat().st_size > 10_000
    step = found["trace"]["rows"]["step"]
    assert sum(step["shares"].values()) == pytest.approx(1)
    assert set(step["shares"]) == {"products", "attention", "other"}
    assert (tmp_path / "gpu_trace.json.gz").stat().st_size > 1000


def test_part_1_of_the_gpu_hour_counts_tests(tmp_path: Path) -> None:
    """Without a CUDA device those of kernels are skipped."""
    options = ["--part", "1", "--device", "cpu", "--small", "--output", str(tmp_path)]
    assert gpu_part(options) == 0
    result = json.loads((tmp_path / "gpu_right.json").read_text())
    kernels, gradients = result["rows"].values()
    assert kernels["passed"] + kernels["skipped"] > 50
    assert gradients["passed"] == result["summary"]["passed"] - kernels["passed"] >= 3
    assert result["summary"]["failed"] == 0
