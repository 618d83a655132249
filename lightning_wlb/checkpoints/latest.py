"""The checkpoints that lie in folders, the newest first.

A checkpoint is as new as its save, by the time that its manifest records: not by its step, since a
run that was set back to an earlier checkpoint writes newer ones of earlier steps, nor by the file
system, where a copy may be younger than what was written after it. One from before there were
manifests, or whose manifest is damaged, is as new as its folder.

Nothing is verified here: whoever reads a checkpoint verifies it, and takes the next where it is
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
"""Under which a checkpoint holds the Slurm job that saved it."""
RESUMABLE = "lr_schedulers"
"""Under which Lightning puts the schedules into a checkpoint, unless it is of weights alone."""


def is_checkpoint(path: Path) -> bool:
    """Whether there is a folder that was a checkpoint when it was written, damaged or not."""
    if (path / REST).is_file():
        return True
    try:
        return manifest.read(path).kind == manifest.CHECKPOINT
    except (OSError, ValueError):
        return False


def checkpoints_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The checkpoints in a folder, also those that a save that died was about to replace.

    Links are left out where they lead to another one of them.
    """
    found: dict[Path, Path] = {}
    for place in (folder, atomic_folders.replaced_by(folder / "any").parent):
        for path in sorted(place.glob(pattern), key=Path.is_symlink):
            if is_checkpoint(path):
                found.setdefault(path.resolve(), path)
    return list(found.values())


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Checkpoints in the order in which they are to be tried."""
    return sorted(set(paths), key=_saved, reverse=True)


def requeue_number(path: Path) -> int | None:
    """N of ``hpc_ckpt_N.ckpt``; None for another name."""
    match = re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", path.name)
    return int(match[1]) if match else None


def older_requeues(path: Path) -> list[Path]:
    """The same job's checkpoints before time limits that came before ``path``; else none.

    One is enough: all that they serve is to go on from the newest of all checkpoints, and what a
    run is to keep its ModelCheckpoint keeps. Those of another job, which may run in the same
    folder, are its own.
    """
    number, job = requeue_number(path), (_rest(path) or {}).get(JOB)
    if number is None:
        return []
    there = checkpoints_in(path.parent, REQUEUE)
    return [each for each in there if (requeue_number(each) or 0) < number and is_of_job(each, job)]


def is_of_job(path: Path, job: str | None) -> bool:
    """Whether a Slurm job saved a checkpoint; True where it is too damaged to say."""
    rest = _rest(path)
    return rest is None or rest.get(JOB) == job


def can_resume(path: Path) -> bool:
    """Whether more than weights was saved; True where a checkpoint is too damaged to say."""
    rest = _rest(path)
    return rest is None or RESUMABLE in rest


def _rest(path: Path) -> dict[str, Any] | None:
    try:
        rest = torch.load(path / REST, map_location="cpu", weights_only=True)
    except Exception:  # whatever a pickle that is damaged can lead to
        return None
    return rest if isinstance(rest, dict) else None


def _saved(path: Path) -> tuple[float, int, str]:
    """When a checkpoint was saved, in seconds since 1970; its step; its name."""
    try:
        written = manifest.read(path)
    except (OSError, ValueError):
        return path.stat().st_mtime, -1, str(path)
    return written.time, written.step, str(path)
