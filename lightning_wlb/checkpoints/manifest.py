"""``manifest.json``: the size and CRC-32 of every file of a folder; and durable files and folders.

:func:`durable` waits until a file is on the disk, not only in the memory of the operating system,
and computes both. The manifest is written last. A folder with a manifest is whole if all its files
are there with their sizes, and undamaged if their checksums agree. The manifest has a checksum too.

CRC-32 is the fastest checksum in Python's library. It finds accidental damage by disks, networks
and hands: flipped bits, files cut short, a file of another save. It does not show who wrote a
folder: whoever can change a file can change the manifest. Files that others add are ignored.

Cost: writing takes as long as the disk does, and each written file is read once more, from the
memory of the operating system; :func:`check` reads as many files at a time as there are processors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_wlb.file_checks import open_regular, read_json

NAME = "manifest.json"
FORMAT = 2
"""Version of the manifest's format; version 1 lacked ``by``, the run that saved the folder."""
CHECKPOINT, EXPORT = "lightning_wlb checkpoint", "lightning_wlb export"
BLOCK_BYTES = 1 << 20
"""Bytes that are read at a time."""


class Damaged(ValueError):
    """A folder is not what was written: the message names folder and file."""


@dataclass(frozen=True)
class File:
    """One file of a folder: its size in bytes, and its CRC-32 in hexadecimal digits."""

    size: int
    crc32: str


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot synchronise folders
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and wait until their names are on the disk."""
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
    with open_regular(path) as file:
        while count := file.readinto(block):
            found = zlib.crc32(memoryview(block)[:count], found)
    return f"{found:08x}"


@dataclass(frozen=True)
class Saver:
    """The run that saved a folder (:mod:`.save_order`)."""

    run: str = ""  # its name; empty if it does not matter which save was last
    number: int = 0  # how many folders the run has saved, with this one
    known: tuple[str, ...] = ()  # other runs whose folders are older


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    kind: str  # CHECKPOINT or EXPORT
    save: str  # identifies the save; ``meta.pt`` of the same save holds it too
    ranks: int  # number of processes that wrote the folder
    step: int  # optimizer steps before the save; -1 for an export
    files: Mapping[str, File]  # by name
    by: Saver = Saver()
    time: float = field(default_factory=lambda: float(time.time()))  # of the save, since 1970

    def __post_init__(self) -> None:
        files = self.files.values()
        numbers = self.step, self.ranks, self.by.number, *(each.size for each in files)
        texts = self.save, self.by.run, *self.by.known, *(each.crc32 for each in files)
        kinds = {int: numbers, str: texts, float: [self.time]}
        if any(type(each) is not kind for kind, values in kinds.items() for each in values):
            raise TypeError("a step, a size, a time, a checksum or who saved it is of another type")
        if not math.isfinite(self.time):
            raise ValueError("its time is no number")


def write(folder: Path, listed: Manifest) -> None:
    """Write a folder's manifest, and wait until it and the names in the folder are on the disk."""
    content = {"format": FORMAT, **asdict(listed)}
    whole = {"content": content, "crc32": _checksum(content)}
    with (folder / NAME).open("x") as file:  # never through a link
        file.write(json.dumps(whole, indent=1))
    durable(folder / NAME)
    sync_folder(folder)


def durable(path: Path) -> File:
    """Wait until a file that was written and closed is on the disk, for the manifest to list it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return File(path.stat().st_size, checksum(path))


def read(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        Damaged: it is missing, cannot be read, or is not what was written.
        ValueError: a newer version of lightning_wlb wrote it.
    """
    try:
        whole = read_json(folder / NAME)
        content = whole["content"]
        if whole["crc32"] != _checksum(content):
            raise ValueError("its checksum is another")
        found = content.pop("format")
        if found in (1, FORMAT):
            files = {name: File(**each) for name, each in content.pop("files").items()}
            by = content.pop("by", {})
            saver = Saver(**by | {"known": tuple(by.get("known", ()))})
            manifest = Manifest(files=files, by=saver, **content)
    except FileNotFoundError as error:
        raise _damage(folder, f"{NAME} is missing") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damage(folder, f"{NAME} is not what was written ({error})") from error
    if found not in (1, FORMAT):
        raise ValueError(
            f"{folder} was written by a newer version of lightning_wlb (format {found}, and this"
            f" one reads {FORMAT}). Update lightning_wlb."
        )
    for name in manifest.files:
        if os.path.basename(name) != name or not name.isprintable():
            raise _damage(folder, f"{NAME} names {name!r}, which is no file of the folder")
    return manifest


def check(folder: Path) -> Manifest:
    """Compare a folder's files with its manifest, in one process; raises :class:`Damaged`."""
    manifest = read(folder)
    check_sizes(folder, manifest)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: check_files(folder, manifest, [name]), manifest.files))
    return manifest


def check_same(folder: Path, manifest: Manifest) -> None:
    """Raise :class:`Damaged` if another save has taken a folder's place since it was read.

    Files are opened by name: what was read may then be of two saves, each of them whole.
    """
    if read(folder).save != manifest.save:
        raise Damaged(f"{folder} was replaced while it was read. Read it, or another one, again.")


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the checksums of some of a folder's files; raises as :func:`check` does."""
    for name in names:
        try:
            same = checksum(folder / name) == manifest.files[name].crc32
        except (OSError, ValueError) as error:
            raise _damage(folder, f"{name} cannot be read ({error})") from error
        if not same:
            raise _damage(folder, f"the content of {name} is not what was written")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of all files; raises as :func:`check` does."""
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
