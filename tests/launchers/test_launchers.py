"""A script that Lightning or torchrun starts, in processes of its own."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.launchers.training import train
from tests.ranks import run_ranks
from tests.strategy.harness import trainer

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("training.py"))


def start(*command: str) -> str:
    """What a command prints; it must end well, and in time."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(folder: Path) -> list[str]:
    return (folder / "losses").read_text().splitlines()


def here(rank: int, folder: Path) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    train(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("unbroken")
    run_ranks(here, 2, folder, process_group=False)
    return losses(folder)


def test_torchrun_restarts_from_the_newest_checkpoint(tmp_path, unbroken):
    agent = ["-m", "torch.distributed.run", "--standalone"]
    agent += ["--nproc-per-node=2", "--max-restarts=1"]
    said = start(*agent, SCRIPT, str(tmp_path), "--dies-after=3")
    assert (tmp_path / "died").exists()
    done = losses(tmp_path)
    # The restart begins after step 2, whose checkpoint is the newest.
    assert done[-2:] == unbroken[2:], said
    assert done[:-2] in (unbroken[:2], unbroken[:3]), said


def test_tasks_that_would_each_start_ranks_are_refused(monkeypatch):
    # What salloc and srun set; Lightning ignores Slurm in a job of this name.
    for name, value in {"NTASKS": "4", "STEP_NUM_TASKS": "4", "JOB_NAME": "interactive"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("NODE_RANK", raising=False)
    with pytest.raises(MisconfigurationException, match=r"4 tasks.*'interactive'.*--job-name"):
        trainer(WLBStrategy(), 2)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    trainer(WLBStrategy(), 2)
