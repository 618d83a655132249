"""The examples run: each with as few steps as show that it does."""

import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import lightning_wlb as wlb
from lightning_wlb.cli.main import main
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, config, data, trainer

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def without_workers() -> None:
    """A rank of run_ranks has no children, and so no loader workers."""
    wlb.WLBDataModule = partial(wlb.WLBDataModule, num_workers=0)


def run_own_model(rank: int) -> str:
    without_workers()
    sys.argv = ["own_model.py", "--steps=8"]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    return printed.getvalue()


def test_a_model_of_ones_own():
    printed, _ = run_ranks(run_own_model, 2, process_group=False)
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
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=0",
        "--data.context_window=1024",
        # Bytes need no training of a tokenizer.
        "--data.documents=stdlib",
    )
    (version,) = (tmp_path / "runs/cli").iterdir()
    assert "context_parallel_size: 2" in (version / "config.yaml").read_text()
    assert len((version / "metrics.csv").read_text().splitlines()) == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(EXAMPLES / "train.sbatch")], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_lets_the_requeue_signal_wait_for_the_strategy(tmp_path):
    """The script with one task, started by a stand-in for srun that runs it as it is."""
    signals = "import os, signal as s; os.kill(os.getpid(), s.SIGUSR1); print(s.sigpending())"
    commands = {
        "srun": 'shift; exec "$@"',
        "scontrol": "echo localhost",
        "rank": f"exec python -c '{signals}'",
    }
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").touch()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"), "1")
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "VENV": str(tmp_path), "PROGRAM": "rank"}
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(EXAMPLES / "train.sbatch")],
        env={**os.environ, **job, "CONFIG": "any.yaml", "PATH": path},
        capture_output=True,
        text=True,
    )
    assert "SIGUSR1" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_slurm_script_has_no_traps():
    subprocess.run(["shellcheck", str(EXAMPLES / "train.sbatch")], check=True)


def demo() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "train_stdlib.py"))


def run_demo(rank: int, folder: Path) -> None:
    """What the rank prints goes to a file, also what was bound to its streams before."""
    os.chdir(folder)
    without_workers()
    sys.argv = ["train_stdlib.py", "--rounds=2", "--steps=1", "--context-window=256"]
    sys.argv += ["--details", "--devices=2"]
    with open(f"said-{rank}", "wb") as said:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(said.fileno(), stream.fileno())
        runpy.run_path(str(EXAMPLES / "train_stdlib.py"), run_name="__main__")
        sys.stdout.flush()


def test_the_demo_runs_its_packings_in_turns(tmp_path):
    """How a script of several Trainers starts ranks is tested in tests/test_readme.py."""
    run_ranks(run_demo, 2, tmp_path, process_group=False)
    printed, other = ((tmp_path / f"said-{rank}").read_text() for rank in range(2))
    figures = json.loads((tmp_path / "runs/figures.json").read_text())
    rounds = figures["rounds"]
    assert list(rounds) == ["original", "best_fit", "auto"]
    # Two turns of a step a round, each of two windows; the others take whole documents.
    assert [each["tokens"] for each in rounds["original"]] == [4 * 256] * 2
    assert [each["tokens"] for each in rounds["best_fit"]] == [
        each["tokens"] for each in rounds["auto"]
    ]
    assert all(2 * 256 < each["tokens"] < 8 * 256 for each in rounds["auto"])
    assert all(0 <= each["waiting"] < 1 for of in rounds.values() for each in of)
    # They learn.
    assert all(of[1]["train_loss"] < of[0]["train_loss"] < 7 for of in rounds.values())
    # What is printed is what the figures say, and nothing else.
    flat = " ".join(printed.split())
    assert "Medians of 2 rounds" in flat
    assert all(sentence in flat for sentence in demo()["sentences"](rounds))
    assert len(re.findall(r"^round +[12] \.{6}  original [\d.]+  best_fit ", printed, re.M)) == 2
    assert "| loss" in flat.replace("│", "|")
    # Lightning's advice where Slurm is installed is another matter.
    said = re.sub(".*`srun`.*", "", printed + other)
    assert "available" not in said
    assert "Trainer" not in said


def in_turns(rank: int, folder: Path) -> list[list[tuple[float, float]]]:
    """Losses and tokens of the steps: unbroken, and in three turns."""
    os.chdir(folder)
    without_workers()

    def losses(name: str, turns: list[int]) -> list[tuple[float, float]]:
        options = {"seed": 3, "devices": 1, "context_window": 256, "profile": None, "output": name}
        contestant = demo()["Contestant"]("auto", Namespace(**options))
        steps = [step for turn in turns for step in contestant.train(turn)]
        return [(step["train_loss"], step["tokens"]) for step in steps]

    return [losses("a", [4]), losses("b", [1, 2, 1])]


def test_a_turn_of_the_demo_goes_on_where_the_last_one_stopped(tmp_path):
    ((unbroken, in_three),) = run_ranks(in_turns, 1, tmp_path, process_group=False)
    assert len(unbroken) == 4
    assert unbroken == in_three


STEP = {
    "imbalance_pipeline": 1.5,
    "imbalance_data": 1.25,
    "imbalance_data_planned": 1.125,
    "step_seconds": 2.0,
    "loader_wait_seconds": 0.25,
    "delay_mean": 0.5,
    "train_loss": 6.0,
    "tokens": 1000.0,
    "tflops_per_device": 0.5,
    "crowded_seconds": 0.5,
}


def test_a_round_of_the_demo_is_the_sum_of_its_steps():
    other = {
        **STEP, "imbalance_data": 2.0, "step_seconds": 6.0, "tokens": 3000.0,
        "tflops_per_device": 0.25, "crowded_seconds": 1.5, "train_loss": 5.0,
    }  # fmt: skip
    assert demo()["measured"]([STEP, other]) == {
        "imbalance_pipeline": 1.5,
        "imbalance_data": 1.625,
        "imbalance_data_planned": 1.125,
        "step_seconds": 4.0,
        "loader_wait_seconds": 0.25,
        "delay_mean": 0.5,
        "train_loss": 5.5,
        "tokens": 4000.0,
        "microseconds_per_token": 2000.0,  # 8 s
        "seconds_per_tflop": 3.2,  # 1 + 1.5 TFLOP
        "waiting": (0.4 + 3.0) / 8,  # a fifth of 2 s, half of 6 s
        "crowded": 0.25,
    }


def a_round(per_token: float, per_tflop: float, waiting: float, crowded: float = 0.0):
    return {
        "microseconds_per_token": per_token,
        "seconds_per_tflop": per_tflop,
        "waiting": waiting,
        "crowded": crowded,
    }


def test_the_demo_divides_round_by_round():
    functions = demo()
    # A machine that slows down to a third between rounds does not show.
    assert functions["ratio"]([4, 9, 3], [2, 6, 3]) == (1.5, 1.0, 2.0, 2)
    with pytest.raises(ValueError, match="shorter"):
        functions["ratio"]([1, 2], [1])
    rounds = {
        "original": [a_round(50, 30, 0.2), a_round(150, 90, 0.3)],
        "auto": [a_round(40, 20, 0.1), a_round(200, 90, 0.0)],
    }
    assert functions["compared"](rounds) == {
        "original": {"per_token": (1.0, 0.75, 1.25, 1), "per_flop": (1.25, 1.0, 1.5, 1)}
    }
    assert functions["middle"](rounds["original"], "waiting") == 0.25


def test_the_demo_says_when_it_was_not_alone_and_when_packings_are_equally_fast():
    rounds = {
        "original": [a_round(50.1, 20, 0.2, 0.3)],
        "auto": [a_round(50, 20, 0.1, 0.2)],
    }
    assert demo()["sentences"](rounds) == [
        "original took 1.00 times as long per token as auto: auto was as fast per token, and ahead"
        " in 1 of 1 rounds.",
        "Waiting for the busiest process took 20% with original and 10% with auto of the time.",
        "Other programs were using these cores: a process was without one for 25% of its time. On"
        " an idle machine the times may compare differently.",
    ]


def test_the_plan_of_llama_3_8b_is_what_its_command_prints(monkeypatch, capsys):
    pytest.importorskip("transformers")
    blocks = re.findall(
        r"```\w*\n(.*?)```", (EXAMPLES / "llama3_8b_128k.md").read_text(), re.DOTALL
    )
    command, shown = blocks
    monkeypatch.chdir(EXAMPLES.parent)
    assert main(shlex.split(command.replace("\\\n", ""))[1:]) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_mesh_of_the_llama_3_8b_example_is_the_one_that_is_planned():
    run = yaml.safe_load((EXAMPLES / "llama3_8b_128k.yaml").read_text())
    command = (EXAMPLES / "llama3_8b_128k.md").read_text()
    sizes = run["wlb"].values()
    assert f"--mesh {','.join(map(str, sizes))} " in command
    assert run["trainer"]["devices"] * run["trainer"]["num_nodes"] == np.prod(list(sizes))
    data = run["data"]
    assert f"--context-window {data['context_window']} " in command
    assert f"--micro-batches {data['micro_batches']} " in command
    packing = re.search(r"Take packing (\w+) ", command)
    assert packing is not None
    assert data["packing"] == packing[1]


def run_transformers_trainer(rank: int) -> str:
    sys.argv = ["transformers_trainer.py", "--longest=64", "--steps=2"]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / "transformers_trainer.py"), run_name="__main__")
    return printed.getvalue()


def test_balanced_steps_in_transformers_trainer():
    pytest.importorskip("accelerate")
    printed, other = run_ranks(run_transformers_trainer, 2, process_group=False)
    assert re.search(r"In random order \d+\.\d\d times as long as balanced", printed)
    assert "In random order" not in other
