"""Folders that are written as a whole or not at all.

A folder is written as ``.partial/NAME`` and renamed when it is done, so that a folder with the
final name is whole. The one that it replaces is kept as ``.old/NAME`` until then. (Lightning finds
the last checkpoint, and Slurm's, by what the names in a folder contain, so neither can lie beside
the checkpoint.)

What died leaves its ``.partial/NAME``. The next folder beside it removes what nothing has been
written to for an hour: what is younger may be another run's.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

_ASIDE, _REPLACED = ".partial", ".old"
_STALE_SECONDS = 3600


def aside_of(path: Path) -> Path:
    """Where the folder ``path`` is written until it is whole."""
    return path.parent / _ASIDE / path.name


def replaced_by(path: Path) -> Path:
    """Where the folder that ``path`` replaces is, between two renames."""
    return path.parent / _REPLACED / path.name


def begin(path: Path) -> None:
    """Make the folder :func:`aside_of` ``path``, empty."""
    aside = aside_of(path)
    _remove_leftovers(aside)
    aside.mkdir(parents=True)


def finish(path: Path) -> None:
    """Rename what was written aside to ``path``, and only then delete what stood there."""
    new, old = aside_of(path), replaced_by(path)
    if path.exists() or path.is_symlink():
        _delete(old)
        old.parent.mkdir(exist_ok=True)
        path.rename(old)
    new.rename(path)
    _delete(old)
    for folder in (new.parent, old.parent):
        with suppress(OSError):  # not there, or not empty
            folder.rmdir()


def _remove_leftovers(aside: Path) -> None:
    """Remove what saves that died have left: under this name at once, under others when stale."""
    _delete(aside)
    if not aside.parent.is_dir():
        return
    for other in aside.parent.iterdir():
        with suppress(FileNotFoundError):  # its own run may rename it just now
            written = max(each.stat().st_mtime for each in (other, *other.rglob("*")))
            if time.time() - written > _STALE_SECONDS:
                rank_zero_info(f"Removing {other}: a save that broke off has left it.")
                _delete(other)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
