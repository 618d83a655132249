"""The launcher and its ranks end together, and not before they may."""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.strategies.launchers import subprocess_script

from lightning_wlb.strategy import launch as module
from lightning_wlb.strategy.launch import Launcher, die_with_launcher, tell_rank
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy import harness
from tests.strategy.test_failures import outcomes

# A rank: what it has been told, a save that takes a while, and its end.
SCRIPT = """
import json, os, sys, time
with open("told", "w") as file:
    told = os.environ["LIGHTNING_WLB_LAUNCHER"], os.getppid(), os.environ["LOCAL_RANK"]
    json.dump(told, file)
time.sleep(1)
open("saved", "w").close()
sys.exit(int(sys.argv[1]))
"""


def launch(folder: Path, exit_code: int, function) -> Launcher:
    """Start one rank beside this process, then call a function with the launcher."""
    os.chdir(folder)
    (folder / "rank.py").write_text(SCRIPT)
    command = [sys.executable, "rank.py", str(exit_code)]
    subprocess_script._basic_subprocess_cmd = lambda: command
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name)
    made = Launcher(LightningEnvironment(), 2, 1)
    made.launch(function, made)
    return made


def interrupted(rank: int, folder: Path) -> dict[str, object]:
    """What Lightning does at Ctrl-C: it kills the other ranks."""
    made = launch(folder, 0, lambda made: made.kill(signal.SIGKILL))
    return {
        "told": json.loads((folder / "told").read_text()),
        "saved": (folder / "saved").exists(),
        "code": made.procs[0].wait(5),
        "mine": (os.getpid(), "LIGHTNING_WLB_LAUNCHER" in os.environ),
    }


@pytest.mark.parametrize("safe", [False, True])
def test_other_ranks_import_nothing_from_the_working_folder_if_this_one_does_not(safe, monkeypatch):
    """Lightning starts them by the same command, but without Python's own options."""
    monkeypatch.setattr(module, "sys", SimpleNamespace(flags=SimpleNamespace(safe_path=safe)))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    seen: list[str | None] = []
    made = Launcher(LightningEnvironment(), 1, 1)
    monkeypatch.setattr(
        made, "_call_children_scripts", lambda: seen.append(os.environ.get("PYTHONSAFEPATH"))
    )
    monkeypatch.setattr(module, "_Observer", mock.Mock())
    made.launch(lambda: None)
    assert seen == ["1" if safe else None]
    assert "PYTHONSAFEPATH" not in os.environ


def test_other_ranks_may_save_before_they_are_killed(tmp_path):
    (result,) = run_ranks(interrupted, 1, tmp_path, process_group=False)
    number, still_told = result["mine"]
    assert result["told"] == [str(number), number, "1"]
    assert (result["saved"], result["code"], still_told) == (True, 0, False)


def left_alone(rank: int, folder: Path) -> None:
    module.GRACE = 0.5
    module._Observer = partial(module._Observer, sleep_period=0.5)
    sys.stderr = open(folder / "err", "w")  # noqa: SIM115
    launch(folder, 3, lambda _: time.sleep(40))


def test_a_rank_that_ends_with_an_error_ends_its_launcher_by_name(tmp_path):
    results, seconds = outcomes(left_alone, 1, tmp_path)
    assert results == [None], "it has ended in the middle of what it did"
    assert seconds < 30
    said = (tmp_path / "err").read_text()
    assert "[rank 0] WLBStrategy: the process of local rank 1 has ended with 3" in said


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's end")
@pytest.mark.parametrize("before", [True, False], ids=["killed before", "killed after"])
def test_a_rank_in_start_up_dies_with_its_launcher(before):
    """Before it has heard of the strategy, while it imports, or after."""
    begin, end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.environ["LIGHTNING_WLB_LAUNCHER"] = str(os.getpid())
        if os.fork() == 0:
            os.close(begin)
            if before:
                while os.getppid() == int(os.environ["LIGHTNING_WLB_LAUNCHER"]):
                    time.sleep(0.01)
            die_with_launcher()
            os.write(end, b"no" if "LIGHTNING_WLB_LAUNCHER" in os.environ else b"up")
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.close(end)
    if not before:
        assert os.read(begin, 2) == b"up"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(begin, 2) == b"", "the rank has ended, and its end of the pipe is closed"
    os.close(begin)


def meets(rank: int, port: int) -> str:
    os.environ["MASTER_PORT"], module.ANSWER_SECONDS = str(port), 0.3
    environment = LightningEnvironment()
    tell_rank(environment, rank, 2)
    processes = module.Processes(process_group_backend=None, timeout=None)
    with pytest.raises(MisconfigurationException) as refused:
        processes.connect(environment, torch.device("cpu"), rank, 2)
    return str(refused.value)


def test_where_another_program_listens_no_rank_waits():
    """It takes connections and never answers, so that rank 0 fails and others would wait."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for said in run_ranks(meets, 2, port, process_group=False, timeout=20):
            assert said.startswith(f"Rank 0 does not answer on port {port} of 127.0.0.1, where")


def test_where_nobody_listens_a_rank_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(module, "RENDEZVOUS", timedelta(seconds=0.3))
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    with pytest.raises(MisconfigurationException, match=r"answer on port 1 of .*has not started"):
        module._find_rank_0("127.0.0.1", 1)


def bars(rank: int, folder: Path) -> list[tuple[str, float, float | None]]:
    """What the bar shows at the end of a run, and of one that goes on from it within the epoch."""
    shown = []
    for steps, resume in ((2, None), (4, "last")):
        bar = RichProgressBar()
        saves = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        options = {"enable_progress_bar": True, "enable_checkpointing": True, "max_steps": steps}
        runner = harness.trainer(WLBStrategy(), 1, callbacks=[bar, saves], **options)
        with patch.object(RichProgressBar, "_stop_progress"):
            made = harness.module(harness.SMALL), harness.data(harness.SMALL)
            runner.fit(*made, ckpt_path=resume)
        (task,) = [each for each in bar.progress.tasks if each.id == bar.train_progress_bar_id]
        shown.append((task.description.split("]")[-1].strip(), task.completed, task.total))
        bar.progress.stop()
    return shown


def test_the_bar_counts_the_steps_of_a_run_that_goes_on(tmp_path):
    """Lightning's says step 4 of 1, and "Epoch 0/-2"."""
    [shown] = run_ranks(bars, 1, tmp_path, process_group=False)
    assert shown == [("Epoch 0", 2, 2), ("Epoch 0", 4, 4)]
