"""A file system that loses its power: ext4 in a file, cut off by its own ioctl.

``EXT4_IOC_SHUTDOWN`` with ``NOLOGFLUSH`` is how the file system's own tests cut the power: from
then on nothing reaches the block device, neither data nor journal, and the next mount finds what a
disk would hold. Data are written back late and without order (``data=writeback``), names every
second (``commit=1``), and a rename makes no file durable by itself (``noauto_da_alloc``), so that
what was not synchronised is lost, or is there with a name and without content.

Not shown: a disk that lies about its cache, and other file systems. Needs root and loop devices.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SHUTDOWN, _NOLOGFLUSH = 0x8004587D, 2
_OPTIONS = "loop,data=writeback,commit=1,noauto_da_alloc"


class Disk:
    """An ext4 file system of 24 MB, mounted at a folder.

    Args:
        home: a folder for the image and the mount.
    """

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
