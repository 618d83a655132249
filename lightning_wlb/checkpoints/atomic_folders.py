"""Folders that are written as a whole or not at all, and that survive a power cut.

A folder is written as ``.partial/NAME-SAVE``, synchronised with the disk, and takes its name by one
system call that exchanges it with what bears the name (``renameat2``), so that at any moment a
whole folder bears it. Where the system or the file system has no such call, the one that is
replaced is ``.old/NAME`` between two renames. (Lightning finds the last checkpoint, and Slurm's, by
what the names in a folder contain, so neither can lie beside the checkpoint.)

What died leaves its folder in ``.partial``. The next save beside it removes what nothing has been
written to for an hour: what is younger may be another run's, even of the same name.

Only what was written here is replaced: a folder whose every file is one of its manifest, or of a
checkpoint's names.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_debug

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.manifest import make_folder, sync_folder

POINTS = (
    "begun",  # the folder aside is made
    "writing",  # a file is opened; several times, on every rank
    "written",  # this rank's shards are on the disk
    "listed",  # the manifest is on the disk
    "moved",  # only without renameat2: what is replaced has another name, and nothing bears its
    "named",  # the new folder bears the name; perhaps not yet on the disk
    "synchronised",  # it does on the disk
    "removed",  # what was replaced is gone
)
"""Where a save may end; :func:`reached` is called at each."""

_ASIDE, _REPLACED = ".partial", ".old"
_STALE_SECONDS = 3600
_LATE_SECONDS = 10
_OURS = re.compile(r"manifest\.json|meta\.pt|\.metadata|__\d+_\d+\.distcp")
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


def reached(point: str) -> None:
    """Say (to the debug log) that a save has come to one of :data:`POINTS`."""
    rank_zero_debug(f"save: {point}")


def replaced_by(path: Path) -> Path:
    """Where the folder that ``path`` replaces is, between two renames."""
    return path.parent / _REPLACED / path.name


@dataclass(frozen=True)
class Aside:
    """A folder that is being written.

    Attributes:
        path: what it is to be called.
        folder: where it is written.
        save: identifies the save; part of the folder's name, which so is this run's own.
    """

    path: Path
    folder: Path
    save: str


def begin(path: Path, kind: str) -> Aside:
    """Make an empty folder aside, to be filled and given to :func:`finish` or :func:`discard`.

    Args:
        path: what it is to be called.
        kind: what may be replaced: ``manifest.CHECKPOINT`` or ``manifest.EXPORT``.

    Raises:
        ValueError: there is something at ``path`` that was not written here.
    """
    refuse_foreign(path, kind)
    save = uuid.uuid4().hex
    aside = Aside(path, path.parent / _ASIDE / f"{path.name}-{save}", save)
    make_folder(aside.folder)
    _remove_leftovers(aside.folder)
    reached("begun")
    return aside


def refuse_foreign(path: Path, kind: str) -> None:
    """Refuse to replace what is not a folder of a kind that was written here, or empty.

    Raises:
        ValueError: naming what would be lost.
    """
    if not path.is_dir():
        if path.exists():
            raise ValueError(
                f"{path} is a file, which a folder cannot replace. Give another name, or remove it."
            )
        return
    names = {each.name for each in path.iterdir()}
    try:
        listed = manifest.read(path)
        own = {manifest.NAME, *listed.files} if listed.kind == kind else set()
    except (OSError, ValueError):
        # Older, or damaged.
        whole = manifest.NAME in names or {"meta.pt", ".metadata"} <= names
        own = {
            name
            for name in names
            if kind == manifest.CHECKPOINT and whole and _OURS.fullmatch(name)
        }
    foreign = sorted(names - own)
    if foreign:
        raise ValueError(
            f"{path} is not a {kind}: it holds {', '.join(foreign[:3])}"
            f"{f' and {len(foreign) - 3} more' if len(foreign) > 3 else ''}, which would be lost."
            " Give another name, or remove the folder."
        )


def finish(aside: Aside) -> None:
    """Give the folder that is written aside its name, and only then delete what bore it.

    Where this raises, the name is as it was, and the folder is aside again.
    """
    path, replaced = aside.path, None
    with ExitStack() as undo:
        if not os.path.lexists(path):
            aside.folder.rename(path)
            undo.callback(path.rename, aside.folder)
        elif _exchange(aside.folder, path):
            undo.callback(_exchange, aside.folder, path)
            replaced = aside.folder
        else:
            replaced = replaced_by(path)
            _delete(replaced)
            make_folder(replaced.parent)
            path.rename(replaced)
            undo.callback(replaced.rename, path)
            sync_folder(replaced.parent)
            reached("moved")
            aside.folder.rename(path)
            undo.callback(path.rename, aside.folder)
        reached("named")
        sync_folder(path.parent)
        undo.pop_all()
    reached("synchronised")
    with suppress(OSError):  # the save is done: what cannot be removed stays
        if replaced is not None:
            _delete(replaced)
        _delete(replaced_by(path))  # of a save that died between two renames
    _tidy(path)
    reached("removed")


def discard(aside: Aside) -> None:
    """Remove what was written aside."""
    shutil.rmtree(aside.folder, ignore_errors=True)
    _tidy(aside.path)


def wait_for(path: Path, size: int | None = None) -> bool:
    """Whether a file of a size, or a folder, is seen: network file systems may show it late."""
    end = time.monotonic() + _LATE_SECONDS
    while True:
        with suppress(OSError):
            if size in (None, path.stat().st_size):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def see(folder: Path) -> None:
    """Refuse to go on where a folder that rank 0 sees is not seen.

    Raises:
        ValueError: on a node without the file system.
    """
    if not wait_for(folder):
        raise ValueError(
            f"{folder} is there on rank 0, and not on {socket.gethostname()}. Checkpoints go to a"
            " file system that all nodes share: give such a folder as default_root_dir or dirpath."
        )


def remove(path: Path) -> None:
    """Delete a checkpoint, or a link, so that there is never a part of it that bears its name.

    Raises:
        ValueError: there is something at ``path`` that was not written here.
    """
    if path.is_symlink():
        path.unlink()
        return
    refuse_foreign(path, manifest.CHECKPOINT)
    if not path.exists():
        return
    gone = path.parent / _ASIDE / f"{path.name}-{uuid.uuid4().hex}"
    make_folder(gone.parent)
    path.rename(gone)
    _delete(gone)
    _tidy(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one system call; False where there is none."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _remove_leftovers(mine: Path) -> None:
    """Remove what saves that died have left, when it is stale by the clock of the file system."""
    now = mine.stat().st_mtime
    for other in mine.parent.iterdir():
        with suppress(OSError):  # renamed just now by its own run, or somebody else's
            written = max(each.stat().st_mtime for each in (other, *other.rglob("*")))
            if now - written > _STALE_SECONDS:
                rank_zero_info(f"Removing {other}: a save that broke off has left it.")
                _delete(other)


def _tidy(path: Path) -> None:
    for name in (_ASIDE, _REPLACED):
        with suppress(OSError):  # not there, or not empty
            (path.parent / name).rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
