"""Files and folders that are on the disk, not only in the memory of the operating system.

What a process has written survives the end of the process, and not that of the machine, until it
is synchronised: a file's content by ``fsync`` of the file, its name by ``fsync`` of the folder.

Cost: as long as the disk takes to write what it was given. SHA-256 takes as much time as reading a
file from a fast disk (1.8 GB a second and core where the processor has instructions for it, 0.5
where not), so that it is computed while the disk is waited for.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20


class DurableFile(io.BufferedWriter):
    """A new file for writing, of which size and hash are known when it is closed, and synchronised.

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
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Append bytes."""
        with self._naming():
            written = super().write(data)
        self._hash.update(data)
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
    def sha256(self) -> str:
        """Of what was written, in hexadecimal digits."""
        return self._hash.hexdigest()


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
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
