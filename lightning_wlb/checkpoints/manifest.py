"""``manifest.json``: the size and CRC-32 of every file of a folder; and the durable files it lists.

:class:`DurableFile` computes both while it writes, and is on the disk, not only in the memory of
the operating system, when it is closed (``fsync`` of the file, then of its folder). The manifest is
written last. A folder that has one is whole if all files are there with their sizes, and undamaged
if their checksums agree. The manifest holds a checksum of itself too.

CRC-32 is the fastest checksum in Python's library. It finds what disks, networks and hands do by
mistake: flipped bits, files cut short, a file of another save. It does not show who wrote a folder:
whoever can change a file can change the manifest. Files that others add are not looked at.

Cost: writing takes as long as the disk does; :func:`check` reads all files once, as many at a time
as there are processors.
"""

from __future__ import annotations

import errno
import io
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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


NAME = "manifest.json"
FORMAT = 1
CHECKPOINT, EXPORT = "lightning_wlb checkpoint", "lightning_wlb export"


class Damaged(ValueError):
    """A folder is not what was written: the message names folder and file."""


@dataclass(frozen=True)
class File:
    """One file of a folder: its size in bytes, and its CRC-32 in hexadecimal digits."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What :func:`write` was given.

    Attributes:
        kind: ``CHECKPOINT`` or ``EXPORT``.
        save: identifies the save, of which every file of the folder is.
        ranks: processes that wrote the folder.
        step: optimizer steps before the save; -1 where there is no such thing.
        time: of the save, in seconds since 1970.
        files: by name.
    """

    kind: str
    save: str
    ranks: int
    step: int
    time: float
    files: Mapping[str, File]


def write(
    folder: Path, kind: str, save: str, ranks: int, step: int, files: Mapping[str, File]
) -> None:
    """Write a folder's manifest, and wait until it and the names in the folder are on the disk."""
    manifest = Manifest(kind, save, ranks, step, time.time(), files)
    content = {"format": FORMAT, **asdict(manifest)}
    with DurableFile(folder / NAME) as file:
        whole = {"content": content, "crc32": _checksum(content)}
        file.write(json.dumps(whole, indent=1).encode())
    sync_folder(folder)


def synchronised(folder: Path) -> dict[str, File]:
    """The files of a folder that another library has written, synchronised with the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = File(path.stat().st_size, checksum(path))
    return files


def read(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it cannot be read, or is not what was written.
        ValueError: it has a newer format.
    """
    try:
        whole = json.loads((folder / NAME).read_bytes())
        content = whole["content"]
        if whole["crc32"] != _checksum(content):
            raise ValueError("its checksum is another")
        found = content.pop("format")
        if found != FORMAT:
            raise NotImplementedError(found)
        files = {name: File(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(files=files, **content)
    except NotImplementedError as error:
        raise ValueError(
            f"{folder} was written by a newer version of lightning_wlb (format {error}, and this"
            f" one reads {FORMAT}). Update lightning_wlb."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damage(folder, f"{NAME} is not what was written ({error})") from error
    for name in manifest.files:
        if os.path.basename(name) != name:
            raise _damage(folder, f"{NAME} names {name!r}, which is not in the folder")
    return manifest


def check(folder: Path) -> None:
    """Read every file of a folder and compare sizes and checksums; one process.

    Raises:
        FileNotFoundError: there is no manifest, so that nothing can be checked.
        Damaged: naming the first file that is not what was written.
    """
    manifest = read(folder)
    check_sizes(folder, manifest)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: check_files(folder, manifest, [name]), manifest.files))


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the checksums of some of a folder's files, one after the other.

    Raises:
        Damaged: naming the first file that is not what was written.
    """
    for name in names:
        try:
            same = checksum(folder / name) == manifest.files[name].crc32
        except OSError as error:
            raise _damage(folder, f"{name} cannot be read ({error.strerror})") from error
        if not same:
            raise _damage(folder, f"the content of {name} is not what was written")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of all files.

    Raises:
        Damaged: naming the first file that is missing or has another size.
    """
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise _damage(folder, f"{name} is missing ({error.strerror})") from error
        if size != file.size:
            raise _damage(folder, f"{name} has {size:,} bytes instead of {file.size:,}")


def _damage(folder: Path, problem: str) -> Damaged:
    return Damaged(f"{folder} is damaged: {problem}. Use another checkpoint.")


def _checksum(content: Mapping[str, Any]) -> str:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(plain.encode()):08x}"
