"""A checkpoint is written by all ranks together, or not at all.

In order: what could not be read again or would replace something else is refused; every rank
writes its shards into a folder aside (:mod:`.checkpoints.folders`) and synchronises them with the
disk, rank 0 everything else; rank 0 sees all files and lists them in the manifest; the folder takes
its name. Where a rank fails, all raise, and what was written is removed.

Cost: the time of the slowest rank's disk, and six small exchanges between ranks.
"""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_wlb.checkpoints import folders, manifest, plain
from lightning_wlb.checkpoints.agreement import Ranks
from lightning_wlb.checkpoints.durable import DurableFile
from lightning_wlb.checkpoints.manifest import File
from lightning_wlb.checkpoints.storage import write_shards

REST = "meta.pt"
"""The file of what is not in shards; Lightning's name for it."""
OWN = "WLBStrategy"
"""The key in that file of what is not Lightning's. A checkpoint with it has a manifest."""


@dataclass(frozen=True)
class Parts:
    """What a checkpoint consists of, as :func:`.sharded.collect` gathers it.

    Attributes:
        state: this rank's shards under global names: tensors (DTensors) and plain values. These
            are the parameters themselves, not copies.
        rest: what else belongs to the checkpoint; written by rank 0.
    """

    state: dict[str, Any]
    rest: Mapping[str, Any]


def write(path: Path, parts: Parts, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint, durably; collective over the ranks of ``group``.

    May run in a thread of its own, with a process group of its own, while nobody changes what
    ``parts`` holds.

    Args:
        path: the folder; replaced if it is a checkpoint.
        parts: of :func:`.sharded.collect`.
        group: all ranks, on the CPU; None means the default group.

    Raises:
        ValueError: ``path`` is not a checkpoint and would be lost.
        OSError: the disk is full, or a file cannot be written; what was written is removed.
    """
    ranks = Ranks(group)
    ranks.each(lambda: plain.check(parts.state))
    ranks.lead(lambda: plain.check(parts.rest))
    aside = None
    try:
        aside = ranks.lead(lambda: folders.begin(path, manifest.CHECKPOINT))
        ranks.each(lambda: folders.see(aside.folder))
        files = write_shards(parts.state, aside.folder, ranks)

        def written() -> tuple[str, dict[str, File]]:
            if ranks.leads:
                files[REST] = _write_rest(parts.rest, aside)
            folders.reached("written")
            return socket.gethostname(), files

        everyone = ranks.every(written)
        step = int(parts.rest.get("global_step", -1))
        ranks.lead(lambda: _finish(aside, everyone, step))
    except BaseException as error:
        # Another rank may raise while rank 0 gives the folder its name, and would empty it then.
        if aside is not None and ranks.leads:
            folders.discard(aside)
        if isinstance(error, OSError):
            raise _unsaved(path, error) from error
        raise


def _write_rest(rest: Mapping[str, Any], aside: folders.Aside) -> File:
    with DurableFile(aside.folder / REST) as file:
        torch.save({**rest, OWN: {"save": aside.save}}, file)
    return File(file.size, file.crc32)


def _finish(
    aside: folders.Aside, everyone: Sequence[tuple[str, Mapping[str, File]]], step: int
) -> None:
    """List what all ranks have written, once rank 0 sees it, and give the folder its name."""
    listed: dict[str, File] = {}
    for rank, (host, files) in enumerate(everyone):
        for name, file in files.items():
            if not folders.wait_for(aside.folder / name, file.size):
                raise ValueError(
                    f"{name} of {file.size:,} bytes, which rank {rank} wrote into {aside.folder} on"
                    f" {host}, is not there on {socket.gethostname()}. Checkpoints go to a file"
                    " system that all nodes share."
                )
            listed[name] = file
    manifest.write(aside.folder, manifest.CHECKPOINT, aside.save, len(everyone), step, listed)
    folders.reached("listed")
    folders.finish(aside)


def _unsaved(path: Path, error: OSError) -> OSError:
    """What a save could not do, and how much room there is now."""
    there = next(each for each in path.parents if each.is_dir())
    free = shutil.disk_usage(there).free
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room, or save elsewhere." if full else "Look at the file system."
    text = (
        f"{path} was not saved ({error}). What was written of it is removed, which leaves"
        f" {free:,} bytes free; what was there before is untouched. {remedy}"
    )
    return OSError(error.errno, text)
