"""A cache of folders that are made once and kept, with names that say what they were made from.

They are in the user's cache folder, unless somebody else can write there or replace one of its
parent folders. If the cache folder cannot be used, each process makes them in its own temporary
folder, which is removed when the process ends.

A folder is written under another name and renamed when it is complete, so that ranks may race, and
an interrupted rank leaves nothing that looks complete. A record in the folder holds its whole name
and the sizes and checksums of its files. Every use verifies it; a damaged folder is made again.

Cost: making the folder, once; then a look at each file, and a checksum of files up to 16 MB.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_cache_dir

from lightning_wlb import file_checks

_Item = TypeVar("_Item")
_ANSWER, _RECORD = "answer.json", "record.json"
_SUMMED_BYTES = 1 << 24
"""Most bytes of a file whose content is compared: reading a token store would take seconds."""
_UNFINISHED = re.compile(r"\..+-[a-z0-9_]{8}(-\d)?")
"""The names of folders that are not complete yet."""


def cache_folder() -> Path:
    """The user's cache folder; if it cannot be written to, this process's temporary folder."""
    return next(folder for folder in _places() if os.access(folder, os.W_OK))


def built_once(key: str, build: Callable[[Path], None]) -> Path:
    """The folder of this name, which is built if there is none.

    Args:
        key: the folder's name, which must tell apart all possible contents.
        build: fills an empty folder with files.
    """
    for root in _places():
        if _is_whole(root / key):
            return root / key
        try:
            aside = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
        except OSError:
            continue
        for left in file_checks.left_behind(aside, _UNFINISHED):
            remove(left)
        break
    else:
        raise OSError(errno.EACCES, f"No folder for {key} can be made, in {root} neither")
    replaced = [aside.with_name(f"{aside.name}-{each}") for each in range(9)]
    try:
        build(aside)
        files = {path.name: described(path) for path in aside.iterdir()}
        (aside / _RECORD).write_text(json.dumps({"key": key, "files": files}))
        for path in aside.iterdir():
            with path.open("rb") as file:  # else a power cut could leave sizes without content
                os.fsync(file.fileno())
        for damaged in replaced:
            with suppress(OSError):
                aside.rename(root / key)
            # Else another rank was first, or the folder is damaged: others may replace it too.
            if _is_whole(root / key):
                return root / key
            with suppress(OSError):
                (root / key).rename(damaged)
                continue
            time.sleep(0.1)  # another rank has renamed the damaged folder, but not its own yet
        raise OSError(f"{root / key} cannot be made: something else always takes its place.")
    finally:
        for each in (aside, *replaced):
            remove(each)


def remove(path: Path) -> None:
    """Remove a folder, or a file or link of that name; ignore errors."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()  # rmtree would open a FIFO, and block


def _places() -> Iterator[Path]:
    """Yield the folders in which to look and to build; only this user can access them."""
    try:
        folder = file_checks.own_folder(Path(user_cache_dir("lightning_wlb")))
    except (OSError, ValueError, RuntimeError) as error:  # a user without a home
        problem = str(error).rstrip(".") + "."
    else:
        yield folder
        problem = f"{folder} cannot be written to."
    yield _temporary_folder(problem, os.getpid())


@cache
def _temporary_folder(problem: str, process: int) -> Path:
    """A folder for this process only, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="lightning_wlb-"))

    def remove_own() -> None:
        if os.getpid() == process:
            remove(folder)

    atexit.register(remove_own)
    _warn(
        f"The user's cache folder cannot be used: {problem} Cached files are made again by every"
        f" process, here in {folder}. Set XDG_CACHE_HOME to a folder of your own."
    )
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder exists as it was built; a warning says why not."""
    if not os.path.lexists(folder):
        return False
    try:
        for each in file_checks.check_folder(folder).iterdir():
            file_checks.check_owner(each.lstat(), each)
        record = file_checks.read_json(folder / _RECORD, links=False)
        there = {each.name: each for each in folder.iterdir() if each.name != _RECORD}
        if record["key"] != folder.name or record["files"].keys() != there.keys():
            raise ValueError("its files are not those that were made under this name.")
        for name, path in there.items():
            if record["files"][name] != described(path):
                raise ValueError(f"{name} is not what was written.")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _warn(f"{folder} is made anew: {error!s}")
        return False
    return True


def _warn(text: str) -> None:
    if _is_first_rank():
        warnings.warn(text, stacklevel=2)


def _is_first_rank() -> bool:
    ranks = sys.modules.get("lightning_utilities.core.rank_zero")  # has the rank, in training
    return ranks is None or getattr(ranks.rank_zero_only, "rank", 0) == 0


def described(path: Path, most: int = _SUMMED_BYTES) -> list[Any]:
    """A file's bytes, and the checksum of its content if it has at most ``most`` bytes."""
    size = file_checks.check_regular(path, links=False)
    small = size <= most
    return [size, zlib.crc32(file_checks.read_bytes(path, most, links=False)) if small else None]


def remembered(name: str, make: Callable[[], str]) -> str:
    """A text that is kept in the user's cache folder: read from there, or made now.

    ``name`` must tell apart all possible texts; a fingerprint of this package's code is added.
    """
    package = Path(__file__).parents[1]
    code = fingerprint(sorted(package.rglob("*.py")), package)
    made: list[str] = []

    def build(folder: Path) -> None:
        made.append(make())
        (folder / _ANSWER).write_text(made[0])

    with suppress(OSError):  # A full disk or a clean-up only costs making the text again.
        folder = built_once(f"{name}-{code}", build)
        if not made:
            return file_checks.read_bytes(folder / _ANSWER).decode()
    return made[0] if made else make()


def fingerprint(files: Iterable[Path], root: Path, *settings: object) -> str:
    """Sixteen hexadecimal digits that change with files (name, size, time of change) and settings.

    Args:
        files: the files, in a fixed order.
        root: the folder to which their names are relative.
        settings: everything else on which the content depends.
    """
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        name = path.relative_to(root).as_posix()
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    for setting in settings:
        digest.update(f"{setting!r}\n".encode())
    return digest.hexdigest()[:16]


def shown(
    items: Iterable[_Item], what: str, total: int | None = None, done: int = 0
) -> Iterable[_Item]:
    """The items, with a progress bar on a terminal.

    ``total`` is the number of all items, ``done`` the number of items that were done before.
    """
    if not _is_first_rank() or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, done, console=Console(stderr=True), transient=True)
