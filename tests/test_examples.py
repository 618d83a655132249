"""The examples run: each with as few steps as show that it does."""

import io
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.demo_picture import main, ratios, read
from lightning_wlb.callbacks.records import Records
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, config, data, trainer

EXAMPLES = Path(__file__).parents[1] / "examples"
SUMMARY = {
    "imbalance_pipeline_aggregate": 1.5,
    "imbalance_pipeline_p99": 2.0,
    "imbalance_data_aggregate": 1.25,
    "imbalance_data_p99": 1.75,
    "seconds_per_million_tokens": 60.0,
    "seconds_per_million_tokens_median": 50.0,
    "tflops_per_device": 0.02,
    "tflops_per_device_median": 0.025,
    "seconds_per_step": 1.5,
    "loader_wait_seconds": 0.002,
    "tokens_per_step": 24_576.3,
    "delay_mean": 0.5,
    "delay_max": 4.0,
    "timed_steps": 45,
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_model_of_ones_own(tmp_path):
    printed = run(tmp_path, str(EXAMPLES / "own_model.py"), "--steps=8").stdout
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5


def fit_own_model(rank: int, mesh: tuple[int, ...] | None) -> list[float]:
    own = runpy.run_path(str(EXAMPLES / "own_model.py"))
    recorder = Recorder()
    strategy = "auto" if mesh is None else WLBStrategy(*mesh)
    runner = trainer(strategy, 1 if mesh is None else int(np.prod(mesh)), callbacks=[recorder])
    runner.fit(own["OwnModule"](config(False), learning_rate=1e-2, seed=7), data(Case()))
    return recorder.losses


def test_a_model_of_ones_own_equals_one_process_under_tensor_parallelism():
    want = fit_own_model(0, None)
    assert len(want) == 3
    for got in run_ranks(fit_own_model, 2, (1, 1, 1, 2), process_group=False):
        assert got == pytest.approx(want, rel=1e-12)


def test_the_command_line(tmp_path):
    run(
        tmp_path,
        str(EXAMPLES / "cli.py"),
        "fit",
        f"--config={EXAMPLES / 'config.yaml'}",
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=0",
        "--data.context_window=1024",
        # Bytes need no training of a tokenizer.
        "--data.documents=stdlib",
    )
    (version,) = (tmp_path / "runs/cli").iterdir()
    assert "context_parallel_size: 2" in (version / "config.yaml").read_text()
    assert len((version / "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(EXAMPLES / "train.sbatch")], check=True)


def test_the_demo_compares_with_its_last_run():
    demo = runpy.run_path(str(EXAMPLES / "train_stdlib.py"))
    faster = {
        **SUMMARY, "seconds_per_million_tokens": 40.0, "tflops_per_device_median": 0.05,
    }  # fmt: skip
    table = demo["comparison"]([SUMMARY, SUMMARY, faster], ["original", "best_fit", "auto"])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    rows = [
        [cell.strip() for cell in line[1:-1].split("│")]
        for line in console.export_text().split("\n")
    ]
    assert ["µs per token", "60.00", "60.00", "40.00", "1.500", "1.500"] in rows
    # Per model FLOP: the reciprocal of the rate, so that below and above 1 mean the same.
    assert ["s per model TFLOP", "50.00", "50.00", "50.00", "1.000", "1.000"] in rows
    assert ["median step", "40.00", "40.00", "20.00", "2.000", "2.000"] in rows
    assert ["ms wait for loader", "2.0", "2.0", "2.0", "", ""] in rows
    assert ["tokens per step", "24,576", "24,576", "24,576", "", ""] in rows
    # Every figure of it is one that the monitor has.
    assert SUMMARY.keys() < Records(devices=1).summary().keys()


def write_metrics(folder: Path, seconds: list[float], tokens: list[int], tflops: list[float]):
    folder.mkdir(parents=True)
    lines = ["step,val_loss,wlb/imbalance_data,wlb/step_seconds,wlb/tokens,wlb/tflops_per_device"]
    lines += [
        f"{step},,1.5,{time},{count},{rate}"
        for step, (time, count, rate) in enumerate(zip(seconds, tokens, tflops, strict=True))
    ]
    lines.append("9,3.0,,,,")  # a line of validation
    (folder / "metrics.csv").write_text("\n".join(lines))


def test_the_picture_of_the_demo(tmp_path, capsys):
    write_metrics(tmp_path / "original/version_9", [99], [1], [1])
    write_metrics(tmp_path / "original/version_10", [9, 9, 2, 4], [1, 1, 10, 20], [1, 1, 3, 1.5])
    write_metrics(tmp_path / "best_fit/version_0", [9, 9, 3, 3], [1, 1, 10, 10], [1, 1, 4, 4])
    write_metrics(tmp_path / "auto/version_0", [9, 9, 1, 2], [1, 1, 10, 10], [1, 1, 4, 4])
    before, after = (read(tmp_path / name) for name in ("original", "auto"))
    np.testing.assert_array_equal(before["step_seconds"], [2, 4])
    # 6 s for 30 tokens and 12 TFLOP, against 3 s for 20 tokens and 12 TFLOP; steps of 0.2 and 0.2
    # against 0.1 and 0.2 s per token, and of 1/3 and 2/3 against 1/4 s per TFLOP.
    assert ratios(before, after) == pytest.approx(
        {
            "time per token": 0.2 / 0.15,
            "time per model FLOP": 2.0,
            "time per token, median step": 0.2 / 0.15,
            "time per model FLOP, median step": 2.0,
        }
    )
    picture = tmp_path / "images/gain.png"
    main(["--runs", str(tmp_path), "--output", str(picture)])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "time per token, original / auto: 1.333" in printed
    assert "time per token, best_fit / auto: 2.000" in printed
    with pytest.raises(SystemExit, match=r"elsewhere.original holds no version_"):
        main(["--runs", str(tmp_path / "elsewhere")])
