"""Folders that are written as a whole or not at all, and that survive a power cut.

A folder is written as ``.partial/NAME-SAVE``. One system call (``renameat2``) then exchanges it
with the folder of that name, so that the name always belongs to a whole folder. Without such a call
there are two renames, and between them the replaced folder is ``.old/NAME``. (Neither may lie
directly beside the checkpoint, where Lightning looks for names.)

A save that dies leaves its folder in ``.partial``. The next save beside it removes folders to which
nothing has been written for an hour: a younger one may be another run's, even of the same name.

Only folders that this package wrote are replaced or deleted. Each of their files must be listed in
the manifest or, if the manifest cannot be read, have the name of a checkpoint's file. Nothing is
deleted behind a link in place of ``.partial`` or ``.old``, nor under other names in these two. In a
folder with the sticky bit, such as ``/tmp``, a save is refused if one of these two belongs to
another user, who could exchange its contents.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_debug

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.manifest import make_folder, sync_folder
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.file_checks import NO_USER, check_links, follow, is_open, left_behind, my_user

POINTS = (
    "begun",  # the partial folder is made
    "writing",  # a file is opened: several times, on every rank
    "written",  # this rank's shards are on the disk
    "listed",  # the manifest is on the disk
    "moved",  # only without renameat2: the replaced folder is in .old, nothing has the name
    "named",  # the new folder has the name, perhaps not yet on the disk
    "synchronised",  # the new name is on the disk
    "removed",  # the replaced folder is gone
)
"""The points at which tests end a save; :func:`reached` is called at each."""

_ASIDE, _REPLACED = ".partial", ".old"
_LATE_SECONDS = 10
"""How long a network file system may take to show what another node has written."""
_UNFINISHED = re.compile(r".+-[0-9a-f]{32}")
"""The names in ``.partial``."""
_CHECKPOINT_FILES = re.compile(r"manifest\.json|meta\.pt|\.metadata|__\d+_\d+\.distcp")
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # of the Linux headers


def reached(point: str) -> None:
    """Note in the debug log that a save has come to one of :data:`POINTS`."""
    rank_zero_debug(f"save: {point}")


def old_folder(path: Path) -> Path:
    """Where the folder that is replaced at ``path`` lies between the two renames."""
    return path.parent / _REPLACED / path.name


def strangers(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Those of ``paths``, checkpoints in a folder or its ``.old``, that strangers have put there.

    Where strangers could not write (the folder is not open, :func:`.file_checks.is_open`, and no
    stranger has made it in an open one), a path is listed if it is open and has a stranger's file.
    All paths in the folder, or in ``.old``, are listed if a stranger's link leads to it.
    """
    places = [each for each in (folder, folder / _REPLACED) if paths and each.is_dir()]
    steps = {each: [*follow(each)[1].values()] for each in places}
    is_shared = any(steps.values()) or any(map(_is_open, places))
    if not is_shared and not any(map(_is_open, paths)):
        return []
    try:
        with TemporaryFile(dir=folder) as file:  # a file server may give it another owner
            mine = os.fstat(file.fileno()).st_uid
    except OSError:
        mine = my_user()

    def is_strange(path: Path) -> bool:
        with suppress(OSError):
            linked = any(stat.S_ISLNK(each.st_mode) for each in steps.get(path.parent, ()))
            owner, inside = path.stat().st_uid, path.iterdir() if _is_open(path) else ()
            owners = {each.lstat().st_uid for each in inside} - {owner}
            owners |= {owner, path.lstat().st_uid} if is_shared else set()
            return linked or not owners <= {mine, 0}
        # It cannot be inspected, or something has vanished.
        return _is_open(path) or not os.path.lexists(path) or path.lstat().st_uid not in (mine, 0)

    return [each for each in paths if is_strange(each)]


def _is_open(path: Path) -> bool:
    with suppress(OSError):
        return path.is_dir() and is_open(path.stat())
    return False


@dataclass(frozen=True)
class PartialFolder:
    """A folder that is being written."""

    path: Path  # its final name
    folder: Path  # where it is written until it is whole
    save: str  # identifies the save; part of the folder's name, so no two saves share a folder


def begin(path: Path, kind: str) -> PartialFolder:
    """Make an empty folder, to be filled and given to :func:`finish` or :func:`discard`.

    A folder of the same kind (``manifest.CHECKPOINT`` or ``EXPORT``) at ``path`` may be replaced.

    Raises:
        ValueError: something else is at ``path`` or its place in ``.old``; ``.partial`` or ``.old``
            is a link or another user's than the folder's; or a stranger's link leads to ``path``.
    """
    check_links(path.parent)
    for each in (path, old_folder(path)):
        refuse_foreign(each, kind)
    _refuse_links(path)
    save = uuid.uuid4().hex
    aside = PartialFolder(path, path.parent / _ASIDE / f"{path.name}-{save}", save)
    make_folder(aside.folder)
    try:
        _refuse_strangers(aside)
    except ValueError:
        aside.folder.rmdir()
        raise
    for other in left_behind(aside.folder, _UNFINISHED):
        with suppress(OSError):  # its own run is renaming it, or it belongs to another user
            rank_zero_info(f"Removing {other}: a save that broke off has left it.")
            _delete(other)
    reached("begun")
    return aside


def refuse_foreign(path: Path, kind: str) -> None:
    """Raise ValueError if ``path`` is a file, or a folder with files that are not of this kind."""
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"{path} is a file, which a folder cannot replace. Give another name, or remove it."
        )
    names = {each.name for each in path.iterdir()} if path.is_dir() else set()
    try:
        listed = manifest.read(path)
        own = {manifest.NAME, *listed.files} if listed.kind == kind else set()
    except (OSError, ValueError):  # damaged
        was_checkpoint = manifest.NAME in names or {"meta.pt", ".metadata"} <= names
        known = kind == manifest.CHECKPOINT and was_checkpoint
        own = {name for name in names if known and _CHECKPOINT_FILES.fullmatch(name)}
    foreign = sorted(names - own)
    if foreign:
        raise ValueError(
            f"{path} is not a {kind}: it holds {', '.join(foreign[:3])}"
            f"{f' and {len(foreign) - 3} more' if len(foreign) > 3 else ''}, which would be lost."
            " Give another name, or remove the folder."
        )


def finish(aside: PartialFolder) -> None:
    """Give a folder its final name, and only then delete the folder that had the name before.

    If this raises, both folders are where they were.
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
            _delete_old(path)
            old = old_folder(path)
            make_folder(old.parent)
            # Not if it is a link by now, made by a stranger while shards were written.
            with _opened(old.parent, os.O_NOFOLLOW) as folder:
                os.rename(path, path.name, dst_dir_fd=folder)
            undo.callback(old.rename, path)
            sync_folder(old.parent)
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
        _delete_old(path)  # also if an earlier save died between two renames
    _tidy(path)
    reached("removed")


def discard(aside: PartialFolder) -> None:
    """Remove a folder whose save has failed."""
    shutil.rmtree(aside.folder, ignore_errors=True)
    _tidy(aside.path)


def wait_for(path: Path, size: int | None = None) -> bool:
    """Wait until a path is there, with ``size`` bytes if given; False after ``_LATE_SECONDS``."""
    end = time.monotonic() + _LATE_SECONDS
    while True:
        with suppress(OSError):
            if size in (None, path.stat().st_size):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def require_shared(folder: Path) -> None:
    """Check that this node sees a folder that rank 0 sees; a ValueError says what to do."""
    if not wait_for(folder):
        raise ValueError(
            f"{folder} is there on rank 0, and not on {socket.gethostname()}. Checkpoints go to a"
            " file system that all nodes share: give such a folder as default_root_dir or dirpath."
        )


def make_shared(folder: Path, ranks: Ranks) -> None:
    """Make a folder, and check that all ranks see what rank 0 puts into it; collective."""
    ranks.lead(lambda: make_folder(folder))
    seen = Path(ranks.lead(lambda: mkdtemp(prefix=".seen-", dir=folder)))
    try:
        ranks.each(lambda: require_shared(seen))
    finally:
        if ranks.leads:
            seen.rmdir()


def remove(path: Path) -> None:
    """Delete a checkpoint, or a link; its name never belongs to a part of a checkpoint."""
    gone = f"{_ASIDE}/{path.name}-{uuid.uuid4().hex}"
    if not path.parent.is_dir():
        return
    with _opened(path.parent) as folder:
        # After opening: a stranger may exchange a folder of his for a link while the run trains.
        check_links(path.parent)
        if not os.path.samestat(os.fstat(folder), path.parent.stat()):
            raise ValueError(f"{path.parent} was exchanged while {path.name} was to be removed.")
        if path.is_symlink():
            os.unlink(path.name, dir_fd=folder)
            return
        refuse_foreign(path, manifest.CHECKPOINT)
        _refuse_links(path)
        if not path.exists():
            return
        make_folder(path.parent / _ASIDE)
        os.rename(path.name, gone, src_dir_fd=folder, dst_dir_fd=folder)
        _delete_at(gone, folder)
        _tidy(path)


def _refuse_links(path: Path) -> None:
    """Refuse links in place of ``.partial`` and ``.old``: files elsewhere would be removed."""
    for folder in (path.parent / _ASIDE, path.parent / _REPLACED):
        if folder.is_symlink():
            raise ValueError(
                f"{folder} is a link, and what lies behind it would be removed. Remove the link."
            )


def _refuse_strangers(aside: PartialFolder) -> None:
    """Refuse another user's ``.partial`` and ``.old`` in a sticky folder."""
    parent = aside.path.parent.stat()
    # A file server may give this process's files another owner, and NO_USER may be anybody.
    trusted = ({parent.st_uid} - {NO_USER}) | {aside.folder.lstat().st_uid}
    for folder in (aside.path.parent / _ASIDE, aside.path.parent / _REPLACED):
        strange = folder.exists() and folder.lstat().st_uid not in trusted
        if strange and parent.st_mode & stat.S_ISVTX:
            raise ValueError(
                f"{folder} belongs to user {folder.lstat().st_uid}, who could exchange a checkpoint"
                f" while it is written. Save to another folder than {aside.path.parent}."
            )


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one system call; False if the system has no such call."""
    linux = sys.platform.startswith("linux")
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if linux else None
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a folder, to rename and delete what is in it wherever its path leads by then."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        yield folder
    finally:
        os.close(folder)


def _delete_old(path: Path) -> None:
    with suppress(FileNotFoundError), _opened(path.parent / _REPLACED, os.O_NOFOLLOW) as folder:
        _delete_at(path.name, folder)


def _delete_at(name: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:  # a link that a save has replaced, such as last.ckpt
        os.unlink(name, dir_fd=folder)


def _tidy(path: Path) -> None:
    """Remove ``.partial`` and ``.old`` beside a path if they are empty."""
    for name in (_ASIDE, _REPLACED):
        with suppress(OSError):
            (path.parent / name).rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
