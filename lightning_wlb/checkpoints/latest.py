"""The checkpoints that lie in folders, the newest first.

A checkpoint is as new as its save, by the time that its manifest records: not by its step, since a
run that was set back to an earlier checkpoint writes newer ones of earlier steps, nor by the file
system, where a copy may be younger than what was written after it. If its manifest is damaged, it
is as new as its folder.

Nothing is verified here: whoever reads a checkpoint verifies it, and takes the next one if it is
damaged. Cost: reading one small file for each checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lightning_wlb.checkpoints import atomic_folders, manifest
from lightning_wlb.checkpoints.writing import REST

REQUEUE = "hpc_ckpt_*.ckpt"
"""What Lightning calls the checkpoints that it saves before Slurm's time limit."""
JOB = "slurm_job_id"
"""The key under which a checkpoint holds the Slurm job that saved it."""
RESUMABLE = "lr_schedulers"
"""The key of learning rate schedules, which Lightning leaves out of a checkpoint of weights."""


def is_checkpoint(path: Path) -> bool:
    """Whether there is a folder that was written as a checkpoint, damaged or not."""
    if (path / REST).is_file():
        return True
    try:
        return manifest.read(path).kind == manifest.CHECKPOINT
    except (OSError, ValueError):
        return False


def checkpoints_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The checkpoints in a folder, and those that a save which died was about to replace.

    A link to another one of them is left out.
    """
    found: dict[Path, Path] = {}
    for place in (folder, atomic_folders.old_folder(folder / "any").parent):
        for path in sorted(place.glob(pattern), key=Path.is_symlink):
            if is_checkpoint(path):
                found.setdefault(path.resolve(), path)
    return list(found.values())


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort checkpoints by the time of their save."""
    return sorted(set(paths), key=_saved, reverse=True)


def requeue_number(path: Path) -> int | None:
    """N of ``hpc_ckpt_N.ckpt``; None for another name."""
    match = re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", path.name)
    return int(match[1]) if match else None


def older_requeues(path: Path) -> list[Path]:
    """The same job's earlier ``hpc_ckpt_N.ckpt``, if ``path`` is one; they can be removed.

    They serve only to go on from the newest checkpoint; ModelCheckpoint keeps what a run is to
    keep. Those of another job, which may run in the same folder, are left out.
    """
    number, job = requeue_number(path), (_rest(path) or {}).get(JOB)
    if number is None:
        return []
    there = checkpoints_in(path.parent, REQUEUE)
    return [each for each in there if (requeue_number(each) or 0) < number and is_of_job(each, job)]


def is_of_job(path: Path, job: str | None) -> bool:
    """Whether a Slurm job saved a checkpoint; True if it is too damaged to say."""
    rest = _rest(path)
    return rest is None or rest.get(JOB) == job


def can_resume(path: Path) -> bool:
    """Whether more than weights was saved; True if a checkpoint is too damaged to say."""
    rest = _rest(path)
    return rest is None or RESUMABLE in rest


def _rest(path: Path) -> dict[str, Any] | None:
    try:
        rest = torch.load(path / REST, map_location="cpu", weights_only=True)
    except Exception:  # a damaged pickle can lead to any
        return None
    return rest if isinstance(rest, dict) else None


def _saved(path: Path) -> tuple[float, int, str]:
    """A checkpoint's time of saving in seconds since 1970, its step and its name."""
    try:
        written = manifest.read(path)
    except (OSError, ValueError):
        return path.stat().st_mtime, -1, str(path)
    return written.time, written.step, str(path)
