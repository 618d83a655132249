"""Folders that are made of files once and kept: their names say what they were made of.

A folder is written aside and renamed when it is complete, so that ranks may race and an interrupted
one leaves nothing behind that could be taken for whole.

Cost: making it, once; later one look at the cache folders.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from platformdirs import user_cache_dir


class _Kept(Protocol):
    """What can be kept as text."""

    def to_json(self) -> str: ...


_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer", bound=_Kept)
_ANSWER = "answer.json"


BESIDE = ".lightning_wlb"
"""Folder beside a source in which what was made of it is kept."""


def cache_folders() -> list[Path]:
    """The user's cache folder, and one for temporary files where one may not write to the first."""
    return [Path(user_cache_dir("lightning_wlb")), Path(tempfile.gettempdir(), "lightning_wlb")]


def built_once(key: str, build: Callable[[Path], None], source: Path | None = None) -> Path:
    """The folder of this name, built where there is none.

    Args:
        key: its name, which holds whatever the content depends on.
        build: fills an empty folder.
        source: the file that it is made of: it is kept beside it (:data:`BESIDE`) where one may
            write there. None, and else: in the user's cache folder, or one for temporary files.
    """
    roots = [*([] if source is None else [source.parent / BESIDE]), *cache_folders()]
    for root in roots:
        if (root / key).is_dir():
            return root / key
    for root in roots:
        try:
            root.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
        except OSError:
            continue
        break
    else:
        root = aside = Path(tempfile.mkdtemp(prefix="lightning_wlb-"))
    try:
        build(aside)
        if aside is root:
            return aside
        aside.chmod(0o755)
        try:
            aside.rename(root / key)
        except OSError:
            # Another rank was first; anything else is an error that must be seen.
            if not (root / key).is_dir():
                raise
    finally:
        if aside is not root:
            shutil.rmtree(aside, ignore_errors=True)
    return root / key


def remembered(name: str, make: Callable[[], _Answer], read: Callable[[str], _Answer]) -> _Answer:
    """An answer that is kept as text in the user's cache folder: read from there, or made now.

    Args:
        name: says what the answer depends on; a fingerprint of this package's code is added.
        make: finds the answer.
        read: the inverse of the answer's ``to_json``; raises ValueError for other text.
    """
    package = Path(__file__).parents[1]
    code = fingerprint(sorted(package.rglob("*.py")), package)
    made: list[_Answer] = []

    def build(folder: Path) -> None:
        made.append(make())
        (folder / _ANSWER).write_text(made[0].to_json())

    try:
        folder = built_once(f"{name}-{code}", build)
    except OSError:  # A disk that is full costs another search the next time.
        if not made:
            raise
    if made:
        return made[0]
    try:
        return read((folder / _ANSWER).read_text())
    except (OSError, ValueError):  # A crash or a clean-up has damaged the answer.
        return make()


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
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    for setting in settings:
        digest.update(f"{setting!r}\n".encode())
    return digest.hexdigest()[:16]


def shown(items: Sequence[_Item], what: str) -> Iterable[_Item]:
    """The items, with a progress bar where someone is watching."""
    ranks = sys.modules.get("lightning_utilities.core.rank_zero")  # which knows where one trains
    rank = 0 if ranks is None else getattr(ranks.rank_zero_only, "rank", 0)
    if rank != 0 or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, len(items), console=Console(stderr=True), transient=True)
