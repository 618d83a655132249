"""Jobs in threads: their order, what is waited for, and what their errors become."""

import time
from pathlib import Path
from threading import Event, Thread, current_thread

import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_wlb.checkpoints.async_saving import (
    COPIES,
    SERVES_ONCE,
    BackgroundSaves,
    FilesAfterSaves,
    Stager,
)
from lightning_wlb.checkpoints.writing import CheckpointContent


def test_one_after_the_other_and_only_as_many_as_needed():
    jobs, gate, done = BackgroundSaves(), Event(), []

    def first() -> None:
        gate.wait()
        done.append(1)

    jobs.submit(Path("one"), first, copies=1)
    jobs.submit(Path("two"), lambda: done.append(2))
    jobs.submit(Path("three"), lambda: done.append(3), copies=1)
    assert jobs.busy
    assert jobs.settle(copies=2) == [], "two copies are there: nothing is waited for"
    assert jobs.busy
    assert done == []
    gate.set()
    assert jobs.settle(copies=1) == []
    assert done[0] == 1
    assert jobs.settle() == []
    assert done == [1, 2, 3]
    assert not jobs.busy


def test_threads_work_on_the_device_of_their_rank(monkeypatch):
    devices: dict[Thread, int] = {current_thread(): 3}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_device_index", lambda: devices.get(current_thread(), 0)
    )
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda at: devices.update({current_thread(): at})
    )
    jobs, used = BackgroundSaves(), []
    jobs.submit(Path("one"), lambda: used.append(torch.accelerator.current_device_index()))
    assert jobs.settle() == []
    assert used == [3]


def test_errors_are_reported_once_and_later_jobs_run():
    jobs, error = BackgroundSaves(), OSError("full")

    def fails() -> None:
        raise error

    jobs.submit(Path("one"), fails)
    jobs.submit(Path("two"), lambda: None)
    end = time.monotonic() + 10
    while jobs.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert jobs.failed
    assert jobs.settle() == [(Path("one"), error)]
    assert not jobs.failed
    assert jobs.settle() == []


def test_waiting_has_an_end():
    jobs, gate = BackgroundSaves(), Event()
    jobs.submit(Path("one"), lambda: gate.wait() and None)  # type: ignore[func-returns-value]
    ((path, error),) = jobs.settle(seconds=0.05)
    assert (path, str(error)) == (Path("one"), "it was not written within 0.05 s")
    assert jobs.busy, "what follows must still come after it"
    gate.set()
    assert jobs.settle() == []


def test_a_name_is_taken_as_if_all_jobs_were_done(tmp_path):
    jobs, gate = BackgroundSaves(), Event()
    files = FilesAfterSaves(LocalFileSystem(), jobs)
    old, new, gone, last = (tmp_path / name for name in ("old", "new", "gone", "last"))
    for each in (old, gone):
        each.mkdir()
    (tmp_path / "to-old").symlink_to("old")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "other").symlink_to(tmp_path)

    def taken() -> list[str]:
        names = ("old", "to-old", "new", "gone", "last", "round")
        return [name for name in names if files.exists(f"{tmp_path}/other/{name}")]

    assert taken() == ["old", "to-old", "gone"]
    jobs.submit(new, lambda: gate.wait() and None, leaves=new)  # type: ignore[func-returns-value]
    assert taken() == ["old", "to-old", "new", "gone"]
    jobs.submit(gone, gone.rmdir)
    jobs.submit(last, lambda: last.symlink_to("new"), leaves=new)
    assert taken() == ["old", "to-old", "new", "last"]
    jobs.submit(new, lambda: None)
    jobs.submit(old, old.rmdir)
    assert taken() == []
    jobs.submit(gone, gone.mkdir, leaves=gone)
    assert taken() == ["gone"]
    assert files.ls(tmp_path / "old") == [], "all else is the disk's"
    gate.set()
    assert jobs.settle() == []
    assert taken() == ["gone"]


def test_copies_are_apart_from_what_they_copy_and_from_one_another():
    stager, value, rest = Stager(torch.device("cpu")), torch.zeros(3), {"best": {"a": 1}}
    copies = []
    for step in range(COPIES):
        value.fill_(step)
        copies.append(stager.stage(CheckpointContent({"model": {"w": value}}, rest), busy=step > 0))
        rest["best"]["a"] += 1
    assert [copy.state["model"]["w"].tolist() for copy in copies] == [[0.0] * 3, [1.0] * 3]
    assert [copy.rest["best"]["a"] for copy in copies] == [1, 2]
    # A third while the second is needed takes the memory of the first, and so does one alone.
    for busy in (True, False):
        again = stager.stage(CheckpointContent({"model": {"w": value}}, rest), busy)
        assert again.state["model"]["w"].tolist() == value.tolist()
        memory = again.state["model"]["w"].data_ptr()
        assert SERVES_ONCE or memory == copies[0].state["model"]["w"].data_ptr()
