"""A power cut at any moment of a save loses nothing that was saved.

The disk is ext4 in a file, cut off by its own ioctl: ``EXT4_IOC_SHUTDOWN`` with ``NOLOGFLUSH`` is
how the file system's own tests cut the power. From then on nothing reaches the block device,
neither data nor journal, and the next mount finds what a disk would hold. Data are written back
late and without order (``data=writeback``), names every second (``commit=1``), and no rename
makes a file durable (``noauto_da_alloc``), so that what was not synchronised is lost, or is there
with a name and without content.

Not shown: a disk that lies about its cache, and other file systems. Needs root and loop devices.
"""

import fcntl
import multiprocessing
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import ranks
from lightning_wlb.checkpoints import atomic_folders, manifest
from tests.checkpoints import small_checkpoints
from tests.soak import table

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*ranks.PRELOADED, "pytest", "tests.soak.test_power_cut"])
CUTS = 60
WIDTH = 4096  # files of many blocks

_SHUTDOWN, _NOLOGFLUSH = 0x8004587D, 2
_OPTIONS = "loop,data=writeback,commit=1,noauto_da_alloc"


class Disk:
    """An ext4 file system of 24 MB, whose image and mount lie in a folder."""

    def __init__(self, home: Path) -> None:
        if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
            pytest.skip("root")
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4")
        self.image, self.folder = home / "image", home / "disk"
        self.folder.mkdir()
        self.image.touch()
        os.truncate(self.image, 24 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self.image)], check=True)
        self._mount()

    def _mount(self) -> None:
        command = ["mount", "-t", "ext4", "-o", _OPTIONS, str(self.image), str(self.folder)]
        subprocess.run(command, check=True)

    def restart(self) -> None:
        """The power is back: what is on the disk, and no more."""
        subprocess.run(["umount", str(self.folder)], check=True)
        self._mount()

    def empty(self) -> None:
        """Remove what lies on the disk."""
        for path in self.folder.iterdir():
            shutil.rmtree(path)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


def cut(folder: Path) -> None:
    """Cut the power of the file system that a folder lies on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
    finally:
        os.close(descriptor)


def save(home: Path, pipe: Connection, point: str, how: str, synchronises: bool) -> None:
    """Save steps 1, 2, ... and tell when each is saved; cut the power at a point of step 2."""
    step = 1

    def reached(name: str) -> None:
        if step == 2 and name == point:
            cut(home)

    with (
        mock.patch.object(atomic_folders, "reached", reached),
        mock.patch.object(
            atomic_folders, "_exchange", _none if how == "two renames" else _exchange
        ),
        mock.patch.object(os, "fsync", os.fsync if synchronises else lambda _: None),
    ):
        while True:
            name = f"last-{step}.ckpt" if how == "a new name" else "last.ckpt"
            small_checkpoints.save(home / name, step, WIDTH)
            pipe.send(step)
            step += 1
            if step > 3 and point:
                return


_exchange = atomic_folders._exchange


def _none(*_: Path) -> bool:
    return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


def saved_before_the_cut(
    disk: Disk, point: str, how: str, seconds: float | None = None, synchronises: bool = True
) -> int:
    """The last step that a process had saved when the power went; the disk is mounted again."""
    ours, theirs = context.Pipe(duplex=False)
    arguments = (disk.folder, theirs, point, how, synchronises)
    process = context.Process(target=save, args=arguments)
    process.start()
    theirs.close()
    steps = [ours.recv()] if seconds is not None else []
    if seconds is not None:
        time.sleep(seconds)
        cut(disk.folder)
    try:
        while ours.poll(60):
            steps.append(ours.recv())
    except EOFError:
        pass
    process.join(60)
    assert not process.is_alive()
    # What came through the pipe after the cut was saved before it, or the save lied.
    disk.restart()
    return max(steps)


def newest(home: Path) -> int:
    """The step of the newest checkpoint that verifies, and that holds this step's numbers."""
    found = [0]
    for path in (*home.glob("*.ckpt"), *home.glob(".old/*.ckpt")):
        try:
            manifest.check(path)
        except (OSError, ValueError):
            continue
        found.append(int(small_checkpoints.load(path, WIDTH)))
    return max(found)


WAYS = ("exchanged", "two renames", "a new name")


@pytest.mark.parametrize("point", atomic_folders.POINTS)
@pytest.mark.parametrize("how", WAYS)
def test_a_cut_at_a_point_of_a_save(how: str, point: str, disk: Disk) -> None:
    if point == "moved" and how != "two renames":
        return  # no save comes there
    saved = saved_before_the_cut(disk, point, how)
    if point in ("synchronised", "removed"):
        assert newest(disk.folder) == 2
    else:
        assert saved == 1
        assert newest(disk.folder) in (1, 2)


def test_cuts_at_any_moment(disk: Disk) -> None:
    for number in range(CUTS):
        chance = random.Random(number)
        how = WAYS[number % len(WAYS)]
        saved = saved_before_the_cut(disk, "", how, chance.uniform(0, 0.3))
        assert newest(disk.folder) in (saved, saved + 1), (number, how)
        disk.empty()
    table.write_figure(f"{CUTS} power cuts at random moments of saves", "no saved step lost")


def test_without_synchronisation_a_cut_loses_what_was_saved(disk: Disk) -> None:
    saved = saved_before_the_cut(disk, "removed", "exchanged", synchronises=False)
    assert newest(disk.folder) < max(saved, 2)
