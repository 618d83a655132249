"""Loader workers: what they have of their rank, and how they end."""

import gc
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, _utils
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_wlb.data import loader_workers as workers

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


class Facts(IterableDataset):
    """What a worker sees of itself; then it is stuck."""

    def __init__(self, network: int, local: int) -> None:
        self.network, self.local = network, local

    def __iter__(self):
        names = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
        yield {
            "ignored": all(
                signal.getsignal(getattr(signal, each)) == signal.SIG_IGN for each in names
            ),
            "network": os.readlink(f"/proc/self/fd/{self.network}"),
            "local": os.readlink(f"/proc/self/fd/{self.local}"),
            "pid": os.getpid(),
            "frozen": gc.get_freeze_count(),
        }
        time.sleep(1000)


@linux
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_worker_heeds_no_signal_and_holds_no_connection(kind, monkeypatch):
    """And torch can end it although it is stuck."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        loader = kind(
            Facts(server.fileno(), ours.fileno()),
            batch_size=None,
            num_workers=1,
            worker_init_fn=workers.begin,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
        workers.make_endable(batches)
        facts = next(batches)
        assert facts["ignored"]
        assert facts["frozen"], "what the rank had made is no garbage of the worker's"
        assert facts["network"] == "/dev/null"
        assert facts["local"].startswith("socket:"), "the queues between the two are local"
        os.kill(facts["pid"], signal.SIGTERM)
        time.sleep(0.1)
        (worker,) = batches._workers
        assert worker.is_alive()
        batches._shutdown_workers()
        worker.join(5)
        assert worker.exitcode == -signal.SIGKILL


@linux
def test_ended_workers_leave_no_descriptor_behind():
    """Every epoch and every validation starts workers, and garbage is collected seldom."""
    gc.disable()
    try:
        counts = []
        for _ in range(4):
            batches = iter(DataLoader(range(2), num_workers=1, multiprocessing_context="fork"))
            workers.make_endable(batches)
            assert len(list(batches)) == 2
            del batches
            for thread in threading.enumerate():
                if thread.name == "QueueFeederThread":  # at its end it closes its queue's pipe
                    thread.join(10)
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert len(set(counts[1:])) == 1, "but for what the first one opens for good"


@linux
def test_a_process_dies_with_its_parent_and_not_after_it_was_let_go():
    """The parent is killed, and either child keeps a pipe open as long as it lives."""
    ends = [os.pipe(), os.pipe()]
    parent = os.fork()
    if parent == 0:
        mine = os.getpid()
        for at, (_, end) in enumerate(ends):
            if os.fork() == 0:
                for other in range(2):
                    os.close(ends[other][0])
                    if other != at:
                        os.close(ends[other][1])
                workers.die_with(mine)
                if at == 1:
                    workers.live_on_without_parent()
                os.write(end, str(os.getpid()).encode())
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
        os._exit(0)
    for _, end in ends:
        os.close(end)
    pids = [int(os.read(begin, 20)) for begin, _ in ends]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(ends[0][0], 1) == b"", "it has ended, and its end of the pipe is closed"
    os.kill(pids[1], 0)
    os.kill(pids[1], signal.SIGKILL)
    for begin, _ in ends:
        os.close(begin)


def test_a_wait_that_is_ended_looks_like_the_end_of_the_data():
    wait = workers.LoaderWait()

    def batches():
        yield torch.ones(1)
        assert wait.since is not None
        raise workers.WaitEnded

    iterator = batches()
    assert wait.next(iterator, False) is not None
    assert (wait.since, wait.ended, wait.holds_batch) == (None, False, False)
    assert wait.next(iterator, True) is None
    assert (wait.since, wait.ended, wait.holds_batch) == (None, True, True)
