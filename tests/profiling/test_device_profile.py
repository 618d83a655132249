"""Measuring this device, on a small grid and in little time: a profile that predicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_wlb.cli.main import main
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import ActionOverhead, Profile
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling.device_profile import measure
from lightning_wlb.profiling.measured_points import GRIDS, Grid
from lightning_wlb.profiling.measurements import DeviceBench, StageTimes, affine

COARSE = Grid(
    queries=(1, 16, 128, 1024),
    keys_per_query=(1.0, 1.5, 4.0, 32.0),
    pairs=2**20,
    rows=(32, 256, 1024),
    repeats=2,
    held_out=2,
)
CONFIG = TransformerConfig.preset("tiny")


@pytest.fixture(scope="module")
def profile() -> Profile:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(
            CONFIG, name="here", device=torch.device("cpu"), dtype=torch.float32, grid=COARSE
        )
    finally:
        torch.set_num_threads(before)


def test_it_says_what_was_measured_and_survives_the_round_trip(profile: Profile) -> None:
    assert profile.measured
    assert profile.device_type == "cpu"
    assert profile.dtype == "float32"
    assert profile.kernel == "cpu"
    assert f"torch {torch.__version__} " in profile.sources[0]
    assert f"dim {CONFIG.dim}," in profile.sources[0]
    assert "own CPU time" in profile.sources[0]
    assert Profile.from_json(profile.to_json()) == profile


def test_rates_are_those_of_a_processor_core(profile: Profile) -> None:
    assert 1e9 < profile.peak_flops < 1e12
    table = profile.attention[0]
    assert table.tile == 1
    # One query over one key is all overhead; 512 over their own prefix is work.
    assert table.forward[0][0] < table.forward[-1][0] < profile.peak_flops
    assert profile.layer.forward[-1] < profile.peak_flops
    assert 1e7 < profile.links["node"].bytes_per_second < 1e12
    assert profile.links["node"].latency_ns > 1000


def test_its_predictions_hold_on_micro_batches_that_were_not_in_the_fit(profile: Profile) -> None:
    # A coarse grid on a busy machine; a real profile is several times better.
    assert profile.errors["micro_batches"] == 2
    assert profile.errors["median"] < 0.5


def test_the_model_gives_back_the_seconds_that_were_measured(profile: Profile) -> None:
    bench = DeviceBench(CONFIG, torch.device("cpu"), torch.float32, COARSE)
    times = np.array([(1e-4, 3e-4), (5e-4, 1.1e-3), (1.9e-3, 4e-3)])
    stages = StageTimes(
        layer=times, head=times, overhead=ActionOverhead((1000.0, 2000.0), (1.0, 2.0))
    )
    bandwidth = bench.element_bytes_per_second(stages)
    layer, head = bench.tables(stages, bandwidth)
    made = replace(
        profile,
        layer=layer,
        head=head,
        action=stages.overhead,
        element_bytes_per_second=bandwidth,
    )
    model = LatencyModel(made, CONFIG.shape)
    for rows, pair in zip(COARSE.rows, times, strict=True):
        for backward in (False, True):
            seconds = pytest.approx(pair[int(backward)] * 1e9, rel=1e-3)
            assert model.linear_ns(rows, backward=backward) == seconds
            assert model.head_ns(rows, backward=backward) == seconds


def test_a_constant_and_a_slope_are_found_and_never_negative() -> None:
    assert affine([10, 100, 1000], [1e-6 + 1e-8 * n for n in (10, 100, 1000)]) == (
        pytest.approx(1000, abs=2),
        pytest.approx(10, rel=1e-3),
    )
    constant, slope = affine([10, 100], [0.0, 2e-6])
    assert constant == 0
    assert slope > 0
    assert affine([10, 100], [0.0, 0.0]) == (0.0, 0.0)


def test_the_command_writes_the_file_and_reports_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRIDS, "cpu", COARSE)
    path = tmp_path / "mine.json"
    code = main(
        [
            "profile", "--model", "tiny,dim=32,ffn_dim=64", "--output", str(path), "--no-links",
            "--device", "cpu",
        ]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    written = json.loads(path.read_text())
    assert written["name"] == "mine"
    assert written["shape"]["dim"] == 32
    assert "held out of the fit: median error" in out
    assert ", measured, " in out
    # And the plan command takes it.
    code = main(
        [
            "plan", "--lengths", "generator-a", "--model", "tiny", "--mesh", "1,1,1,1", "--steps",
            "2", "--context-window", "1024", "--packing", "original", "--profile", str(path),
        ]
    )  # fmt: skip
    assert code == 0
    assert "measured on layers of dim 32" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda"], "sees no CUDA device"),
        (["--threads", "0"], "at least 1"),
        (["--threads", "100000000"], "this machine has"),
        (["--output", "."], "is a folder"),
        (["--device", "cpu", "--attention-backend", "torch"], "'torch' is not available"),
        (["--output", "no/such/folder/p.json"], "there is no folder"),
        (["--model", "huge"], "'huge' is none of the presets"),
    ],
)
def test_a_mistake_is_answered(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    arguments = ["profile", "--model", "tiny", "--output", str(tmp_path / "p.json"), *options]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
