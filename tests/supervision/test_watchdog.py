"""A rank that waits for one that is out of reach is ended, whatever it waits in."""

import ctypes
import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_wlb.supervision import heartbeat, signals, watchdog
from lightning_wlb.supervision.faults import Faults
from tests.ranks import run_ranks
from tests.strategy.test_failures import outcomes


def interrupt_twice() -> None:
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)


def failing(rank: int, folder: Path, interrupts: bool) -> None:
    """Rank 0 waits in a barrier, where no handler runs. Rank 1 fails, or rank 0 is interrupted.

    Rank 1 does not end before rank 0, so that no connection closes.
    """
    watchdog.GRACE = heartbeat.PATIENCE = 0.5
    os.environ.update(RANK=str(rank))
    dist.init_process_group("gloo")
    faults = Faults()
    faults.begin(rank, 2, timedelta(seconds=60))
    sys.stderr = open(folder / f"{rank}.err", "w")  # noqa: SIM115
    if rank == 0:
        if interrupts:
            signal.signal(signal.SIGINT, signals._interrupt)
            threading.Thread(target=interrupt_twice).start()
        dist.barrier()
    if not interrupts:
        runner = SimpleNamespace(global_step=3, state=SimpleNamespace(stage=None))
        runner._active_loop = None
        runner.checkpoint_callbacks = []
        faults.on_exception(runner, None, ValueError("only here"))  # type: ignore[arg-type]
        assert faults.alone is not None
    time.sleep(10 if interrupts else 4)


@pytest.mark.parametrize(
    ("interrupts", "cause"),
    [(False, "rank 1 failed, before the first step"), (True, "it was interrupted twice")],
)
def test_a_rank_that_cannot_come_out_of_a_collective_is_ended(interrupts, cause, tmp_path):
    results, _ = outcomes(failing, 2, tmp_path, interrupts)
    assert results[0] is None, "it ended while it waited"
    if interrupts:
        assert results[1] is None, "rank 0 has died"
    else:
        assert results[1] == (True, None), "who comes out by itself is left to do so"
    last = (tmp_path / "0.err").read_text().splitlines()[-1]
    assert last.startswith(f"[rank 0] WLBStrategy: this process ends, since {cause}")


def locked(rank: int, folder: Path, dies: bool) -> None:
    """Rank 0 holds Python's lock for ever, after rank 1 has died or while it waits for rank 0.

    Rank 0 also writes to a pipe that nobody reads.
    """
    watchdog.GRACE = watchdog.LOCKED = 0.3
    os.environ.update(RANK=str(rank))
    dist.init_process_group("gloo")
    faults = Faults()
    kept = os.dup(2)
    if rank == 0:
        _, full = os.pipe()
        os.set_blocking(full, False)
        with suppress(BlockingIOError):
            while True:
                os.write(full, bytes(1 << 16))
        os.set_blocking(full, True)
        os.dup2(full if not dies else os.open(folder / "0.err", os.O_CREAT | os.O_WRONLY), 2)
    faults.begin(rank, 2, timedelta(seconds=2.5 if not dies else 60))
    dist.barrier()
    if rank == 1 and dies:
        os._exit(1)
    assert faults._watchdog is not None
    while rank == 0 and dies and faults._watchdog._verdict != "alone":
        time.sleep(0.01)
    if rank == 0:
        ctypes.PyDLL(None).sleep(50)
    os.dup2(kept, 2)
    dist.barrier()


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_in_foreign_code_that_holds_the_lock_is_ended_too(dies, tmp_path):
    results, seconds = outcomes(locked, 2, tmp_path, dies)
    assert results[0] is None
    assert seconds < 30
    if dies:
        assert results[1] is None
        said = (tmp_path / "0.err").read_text()
        assert "Timeout (0:00:00." in said
        assert "in locked" in said, "where it was"
    else:
        assert results[1] is not None, "it comes out of its wait when rank 0 has ended"
        assert not results[1][0]


def watched(rank: int) -> str:
    faults = Faults()
    faults.begin(rank, 2, timedelta(seconds=60))
    assert faults._watchdog is not None
    if (child := os.fork()) == 0:
        faulthandler.cancel_dump_traceback_later()  # as at its end: the timer's thread is not here
        os._exit(0)
    signal.alarm(20)
    assert os.waitpid(child, 0)[1] == 0
    signal.alarm(0)
    with mock.patch.object(watchdog, "faulthandler") as timer:
        faults._watchdog._end_in(60.0)  # in the last moment of the run
        faults.end()
    assert timer.mock_calls[-1] == mock.call.cancel_dump_traceback_later()
    assert signal.set_wakeup_fd(-1) == -1, "as it was before"
    return "fine"


def test_nothing_is_left_of_a_watch_that_has_ended():
    assert run_ranks(watched, 2) == ["fine", "fine"]


def test_a_ctrl_c_that_a_forked_child_tells_of_too_is_one(monkeypatch):
    """It inherits the descriptor through which signals are told, and a terminal signals both."""
    monkeypatch.setattr(watchdog, "heeds_interrupts", lambda: True)
    one, other = socket.socketpair()
    thread = watchdog.Watchdog(0, 2, heartbeat.Connection(one), "secret", 60.0, 60.0)
    signal.set_wakeup_fd(-1)
    for pause in (0.0, 0.0, 0.3):
        assert thread._end_at == float("inf")
        time.sleep(pause)
        thread._waker.send(bytes([signal.SIGINT]))
        thread._count_interrupts()
    assert thread._end_at < float("inf"), "the second one"
    faulthandler.cancel_dump_traceback_later()
    watchdog._watching.clear()
    for end in (one, other, thread._woken, thread._waker):
        end.close()


def test_who_is_not_read_any_more_goes_on(monkeypatch):
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    watchdog.say(0, "whatever")


def test_who_is_read_no_more_waits_for_nobody(monkeypatch):
    """A pipe that is full blocks its writer for as long as nobody reads."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, bytes(4096))
    monkeypatch.setattr(watchdog, "READ_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", open(theirs, "w"))  # noqa: SIM115
    caller = threading.Thread(target=watchdog.say, args=[0, "whatever"], daemon=True)
    caller.start()
    caller.join(5)
    try:
        assert not caller.is_alive(), "it tells the others next"
    finally:
        os.close(ours)  # which ends the thread that writes


def test_of_a_deep_stack_the_innermost_frames_are_shown(capfd):
    def dive(depth: int) -> None:
        dive(depth - 1) if depth else watchdog._print_stack(0)

    dive(200)
    shown = capfd.readouterr().err
    assert "in _print_stack" in shown
    assert len(shown.splitlines()) <= 3 * watchdog.FRAMES + 2
