"""Folders that are made of files once and kept: their names say what they were made of.

They lie in the user's cache folder, if nobody else can put anything there or exchange a folder that
leads there: what is written would lie elsewhere. Where it cannot be used, each process makes them
anew in a temporary folder of its own, which goes when the process ends.

A folder is written aside and renamed when it is complete, so that ranks may race and an interrupted
one leaves nothing behind that could be taken for whole. A record in it holds its whole name and the
sizes and checksums of its files, by which it is verified whenever it is found; what is damaged is
made anew.

Cost: making it, once; later a look at each file, and a checksum of those of at most 16 MB.
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
"""Most bytes of a file whose content is compared too: a token store takes seconds to read."""
_UNFINISHED = re.compile(r"\..+-[a-z0-9_]{8}(-\d)?")
"""The names of folders that are not whole yet."""


def cache_folder() -> Path:
    """The user's cache folder; where it cannot be written to, this process's temporary one."""
    return next(folder for folder in _places() if os.access(folder, os.W_OK))


def built_once(key: str, build: Callable[[Path], None]) -> Path:
    """The folder of this name, built where there is none.

    Args:
        key: the folder's name, which holds whatever the content depends on.
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
            with path.open("rb") as file:  # after a power cut sizes may be there, and no content
                os.fsync(file.fileno())
        for damaged in replaced:
            with suppress(OSError):
                aside.rename(root / key)
            # Else another rank was first, or what is there is damaged: others may replace it, too.
            if _is_whole(root / key):
                return root / key
            with suppress(OSError):
                (root / key).rename(damaged)
                continue
            time.sleep(0.1)  # another rank is between its two renamings
        raise OSError(f"{root / key} cannot be made: something else always takes its place.")
    finally:
        for each in (aside, *replaced):
            remove(each)


def remove(path: Path) -> None:
    """Remove a folder, or a file or link in its place; what cannot be removed stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()  # rmtree would open a FIFO, and wait


def _places() -> Iterator[Path]:
    """Yield the folders to look and to build in, which only this user can look into."""
    folder = Path(user_cache_dir("lightning_wlb"))
    try:
        folder = file_checks.own_folder(folder)
    except (OSError, ValueError) as error:
        problem = str(error)
    else:
        yield folder
        problem = f"{folder} cannot be written to."
    yield _temporary_folder(problem, os.getpid())


@cache
def _temporary_folder(problem: str, process: int) -> Path:
    """A folder of this process alone, which is removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="lightning_wlb-"))

    def remove_own() -> None:
        if os.getpid() == process:
            remove(folder)

    atexit.register(remove_own)
    _warn(
        f"The user's cache folder cannot be used: {problem} What would be kept there is made anew"
        f" by every process, here in {folder}. Let XDG_CACHE_HOME name a folder of your own."
    )
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder is there as it was built; a warning says why one is not."""
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
    ranks = sys.modules.get("lightning_utilities.core.rank_zero")  # which knows where one trains
    return ranks is None or getattr(ranks.rank_zero_only, "rank", 0) == 0


def described(path: Path, most: int = _SUMMED_BYTES) -> list[Any]:
    """A file's bytes, and the checksum of its content where it has at most ``most``."""
    size = file_checks.check_regular(path, links=False)
    small = size <= most
    return [size, zlib.crc32(file_checks.read_bytes(path, most, links=False)) if small else None]


def remembered(name: str, make: Callable[[], str]) -> str:
    """A text that is kept in the user's cache folder: read from there, or made now.

    ``name`` says what it depends on; a fingerprint of this package's code is added.
    """
    package = Path(__file__).parents[1]
    code = fingerprint(sorted(package.rglob("*.py")), package)
    made: list[str] = []

    def build(folder: Path) -> None:
        made.append(make())
        (folder / _ANSWER).write_text(made[0])

    with suppress(OSError):  # A disk that is full, or a clean-up, costs another search.
        folder = built_once(f"{name}-{code}", build)
        if not made:
            return file_checks.read_bytes(folder / _ANSWER).decode()
    return made[0] if made else make()


def fingerprint(files: Iterable[Path], root: Path, *settings: object) -> str:
    """Sixteen hexadecimal digits that change with files (name, size, time of change) and settings.

    Args:
        files: in an order that does not change.
        root: the folder that their names are relative to.
        settings: whatever else the content depends on.
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
    """The items, with a progress bar where someone is watching.

    ``total`` is how many there are, ``done`` how many of them were before these.
    """
    if not _is_first_rank() or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, done, console=Console(stderr=True), transient=True)
