"""A script that Lightning or torchrun starts, in processes of its own."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_wlb.strategy import launch
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


def may_have_children() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def here(rank: int, folder: Path) -> None:
    may_have_children()
    train(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("unbroken")
    run_ranks(here, 2, folder, process_group=False)
    return losses(folder)


def check_restarted(folder: Path, unbroken: list[str], said: str = "") -> None:
    assert (folder / "died").exists()
    done = losses(folder)
    # The restart begins after step 2, whose checkpoint is the newest.
    assert done[-2:] == unbroken[2:], said
    assert done[:-2] in (unbroken[:2], unbroken[:3]), said


def train_and_note(folder: Path) -> None:
    """Training, which once is killed; once restarted, ranks meet elsewhere than the dead ones."""
    find, stores = launch._store_of_restart, []

    def noted() -> dict[str, Any]:
        stores.append(find())
        return stores[-1]

    with patch.object(launch, "_store_of_restart", noted):
        train(folder, dies_after=3)
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert [list(each) for each in stores] == [["store"]]


def agent(rank: int, folder: Path) -> None:
    """What torchrun is: its agent, here of ranks that are forked and need not import anything."""
    may_have_children()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # as --standalone
        max_restarts=1,
        start_method="fork",
    )
    elastic_launch(config, train_and_note)(folder)


def test_torchruns_agent_restarts_from_the_newest_checkpoint(tmp_path, unbroken):
    run_ranks(agent, 1, tmp_path, process_group=False)
    check_restarted(tmp_path, unbroken)


@pytest.mark.soak
def test_torchrun_restarts_a_script_from_the_newest_checkpoint(tmp_path, unbroken):
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1"]
    check_restarted(tmp_path, unbroken, start(*command, SCRIPT, str(tmp_path), "--dies-after=3"))


def test_tasks_that_would_each_start_ranks_are_refused(monkeypatch):
    # What salloc and srun set; Lightning ignores Slurm in a job of this name.
    for name, value in {"NTASKS": "4", "STEP_NUM_TASKS": "4", "JOB_NAME": "interactive"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("NODE_RANK", raising=False)
    with pytest.raises(MisconfigurationException, match=r"4 tasks.*'interactive'.*--job-name"):
        trainer(WLBStrategy(), 2)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    trainer(WLBStrategy(), 2)
