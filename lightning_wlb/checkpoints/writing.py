"""A checkpoint is written by all ranks together, or not at all.

In order: what could not be read again or would replace something else is refused; every rank
writes its shards into a folder aside (:mod:`.atomic_folders`) and synchronises them with the
disk, rank 0 everything else; rank 0 sees all files and lists them in the manifest; the folder takes
its name. Where a rank fails, all raise, and what was written is removed.

Cost: the time of the slowest rank's disk, and six small exchanges between ranks.
"""

from __future__ import annotations

import errno
import io
import pickle
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from lightning_wlb.checkpoints import atomic_folders, manifest
from lightning_wlb.checkpoints.manifest import DurableFile, File
from lightning_wlb.distributed.collective_errors import Ranks

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
    ranks.each(lambda: check_plain(parts.state))
    ranks.lead(lambda: check_plain(parts.rest))
    aside = None
    try:
        aside = ranks.lead(lambda: atomic_folders.begin(path, manifest.CHECKPOINT))
        ranks.each(lambda: atomic_folders.see(aside.folder))
        files = write_shards(parts.state, aside.folder, ranks)

        def written() -> tuple[str, dict[str, File]]:
            if ranks.leads:
                files[REST] = _write_rest(parts.rest, aside)
            atomic_folders.reached("written")
            return socket.gethostname(), files

        everyone = ranks.every(written)
        step = int(parts.rest.get("global_step", -1))
        ranks.lead(lambda: _finish(aside, everyone, step))
    except BaseException as error:
        # Another rank may raise while rank 0 gives the folder its name, and would empty it then.
        if aside is not None and ranks.leads:
            atomic_folders.discard(aside)
        if isinstance(error, OSError):
            raise _unsaved(path, error) from error
        raise


def _write_rest(rest: Mapping[str, Any], aside: atomic_folders.Aside) -> File:
    with DurableFile(aside.folder / REST) as file:
        torch.save({**rest, OWN: {"save": aside.save}}, file)
    return File(file.size, file.crc32)


def _finish(
    aside: atomic_folders.Aside, everyone: Sequence[tuple[str, Mapping[str, File]]], step: int
) -> None:
    """List what all ranks have written, once rank 0 sees it, and give the folder its name."""
    listed: dict[str, File] = {}
    for rank, (host, files) in enumerate(everyone):
        for name, file in files.items():
            if not atomic_folders.wait_for(aside.folder / name, file.size):
                raise ValueError(
                    f"{name} of {file.size:,} bytes, which rank {rank} wrote into {aside.folder} on"
                    f" {host}, is not there on {socket.gethostname()}. Checkpoints go to a file"
                    " system that all nodes share."
                )
            listed[name] = file
    manifest.write(aside.folder, manifest.CHECKPOINT, aside.save, len(everyone), step, listed)
    atomic_folders.reached("listed")
    atomic_folders.finish(aside)


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


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def check_plain(state: Any) -> None:
    """Refuse state that could not be read again.

    Args:
        state: dictionaries, lists and tuples of values.

    Raises:
        ValueError: naming the keys that lead to the value, and its class.
    """
    for where, value in _leaves(state, ""):
        if type(value) not in _PLAIN and not _readable(value):
            kind = type(value)
            raise ValueError(
                f"A checkpoint cannot hold {where}: an object of {kind.__module__}.{kind.__name__}"
                " could not be read again without running code. Keep plain Python values or tensors"
                " in the state instead: float(x), str(path), x.total_seconds(),"
                " dataclasses.asdict(x)."
            )


def _leaves(state: Any, where: str) -> Iterator[tuple[str, Any]]:
    if type(state) is dict:
        for key, value in state.items():
            yield f"the key {key} in {where or 'it'}", key
            yield from _leaves(value, f"{where}[{key!r}]")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):
            yield from _leaves(value, f"{where}[{index}]")
    elif not isinstance(state, torch.Tensor):
        yield where, state


def _readable(value: Any) -> bool:
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        torch.load(written, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


class _DurableFiles(FileSystem):
    """The library's access to files; of those that it writes it keeps size and checksum."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "a file of a save is written once, from its beginning"
        atomic_folders.reached("writing")
        with DurableFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.written[file.path.name] = File(file.size, file.crc32)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


def write_shards(state: dict[str, Any], folder: Path, ranks: Ranks) -> dict[str, File]:
    """Write this rank's shards, and on rank 0 ``.metadata``; collective over ``ranks``.

    Returns:
        The files that this rank has written.

    Raises:
        OSError: where a rank could not write, on all ranks.
        RuntimeError: for another reason.
    """
    # Closing a file synchronises it.
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = files = _DurableFiles()
    with library_errors(RuntimeError), unwarned(ranks):
        dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.alone)
    return files.written


@contextmanager
def library_errors(otherwise: type[Exception]) -> Iterator[None]:
    """The library's report of all ranks' stacks, as the error of the first that failed."""
    try:
        yield
    except CheckpointException as report:
        rank, (error, _) = min(report.failures.items())
        if not isinstance(error, Exception):
            raise error from None
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"rank {rank}: {error.strerror}", error.filename) from error
        raise otherwise(f"rank {rank}: {type(error).__name__}: {error}") from error


@contextmanager
def unwarned(ranks: Ranks) -> Iterator[None]:
    """The library warns a process by itself that it is by itself."""
    if not ranks.alone:  # may be in a thread, and filters are the process's
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        yield
