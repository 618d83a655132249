"""Files and folders that are on the disk, not only in the memory of the operating system.

What a process has written survives the end of the process, and not that of the machine, until it
is synchronised: a file's content by ``fsync`` of the file, its name by ``fsync`` of the folder.

Files are known again by CRC-32. It finds what disks, networks and hands do by mistake (every damage
of up to 32 bits in a row, and all but one of four billion others), and not what is done on purpose.
Of the checksums in Python's library it is the fastest.

Cost of writing: as long as the disk takes for what it is given.
"""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20


class DurableFile(io.BufferedWriter):
    """A new file for writing: on the disk, of known size and checksum, when it is closed.

    Closing writes what is buffered and waits for the disk.

    Args:
        path: of the file; there must be none.

    Attributes:
        size: bytes that were written.

    Raises:
        FileExistsError: there is a file.
        OSError: of a write, with the file's path.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"), BLOCK_BYTES)
        self.path = path
        self.size = 0
        self._checksum = 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        with self._naming():
            written = super().write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self.size += written
        return written

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        with self._naming():
            super().flush()

    def close(self) -> None:
        """Write what is buffered, wait for the disk, close."""
        if self.closed:
            return
        try:
            self.flush()
            with self._naming():
                os.fsync(self.fileno())
        finally:
            super().close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors of writes do not say of which file."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    @property
    def crc32(self) -> str:
        """Of what was written, in hexadecimal digits."""
        return f"{self._checksum:08x}"


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and those that it is in, where they are missing, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:  # another run has just removed the parent, which was empty
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def checksum(path: Path) -> str:
    """CRC-32 of a file's content, in hexadecimal digits."""
    block, found = bytearray(BLOCK_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            found = zlib.crc32(memoryview(block)[:count], found)
    return f"{found:08x}"
