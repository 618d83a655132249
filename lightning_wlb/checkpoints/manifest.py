"""What a folder holds: ``manifest.json``, written last, with size and checksum of each other file.

A folder with a manifest is whole when all files are there with their sizes, and undamaged when
their checksums (:mod:`.durable`) are those that were computed while they were written. That finds
what disks, networks and hands do to files: flipped bits, files cut short, a file of another save.
It does not show who wrote a folder: whoever can change a file can change the manifest.

The manifest holds a checksum of itself too. Cost of :func:`check`: reading all files once, as many
at a time as there are processors. What others add to a folder is not looked at.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_wlb.checkpoints.durable import DurableFile, checksum, sync_folder

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
