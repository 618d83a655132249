"""All ranks write a checkpoint together, or not at all.

A save that could not be read again, or would replace something else, is refused. Then every rank
writes its shards, and rank 0 all other state, into a partial folder (:mod:`.atomic_folders`). Rank
0 waits until it sees all files, lists them in the manifest and gives the folder its name. If a rank
fails, all raise, and the partial folder is removed.

``torch.load(weights_only=True)`` must be able to read a save again: plain types and tensors only.
``torch.save`` writes any object, and a run would notice only when it resumes. So the state is
checked before: built-in types pass at once, anything else is written and read on trial.

Cost: the time of the slowest rank's disk, seven small exchanges between ranks, microseconds for
each entry of the state, and a copy in memory of each entry of no built-in type.
"""

from __future__ import annotations

import errno
import io
import pickle
import shutil
import socket
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_wlb.checkpoints import atomic_folders, manifest
from lightning_wlb.checkpoints.manifest import File, Manifest, durable
from lightning_wlb.checkpoints.pickle_checks import KeyCheck, check_archive, load_plain
from lightning_wlb.checkpoints.save_order import SavingRun
from lightning_wlb.distributed.collective_errors import Ranks, differences

REST = "meta.pt"
"""The file of all state that is not in shards. Lightning's name for it."""
OWN = "WLBStrategy"
"""The key in that file under which the save's identity stands."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class CheckpointContent(NamedTuple):
    """The content of a checkpoint, as :func:`.sharded.collect` gathers it on a rank.

    ``state`` has this rank's shards under global names: DTensors, tensors and plain values, not
    copies. ``rest`` is all other state, the same on every rank, which rank 0 writes.
    """

    state: dict[str, Any]
    rest: Mapping[str, Any]


def write(
    path: Path,
    content: CheckpointContent,
    group: dist.ProcessGroup | None = None,
    run: SavingRun | None = None,
) -> None:
    """Write a checkpoint; collective over the ranks of ``group`` (None: the default one).

    It may run in a thread with a process group of its own if nobody changes what ``content`` holds
    meanwhile. A checkpoint at ``path`` is replaced. ``run`` names a run that saves repeatedly.

    Raises:
        ValueError: there is something else at ``path``, or state could not be read again.
        OSError: a file could not be written, as on a full disk; nothing of the save is left.
    """
    ranks = Ranks(group)
    ranks.each(lambda: check_plain(content.state))
    ranks.lead(lambda: check_plain(content.rest))
    for each in differences(ranks.every(lambda: _sums_of_tensors(content.rest))):
        rank_zero_warn(
            f"Ranks have different values of a state ({each}) A checkpoint holds that of rank 0"
            " alone, which a resumed run has on every rank. Keep the same value on all ranks, for"
            " example a parameter's full_tensor()."
        )
    aside = None
    try:
        aside = ranks.lead(lambda: atomic_folders.begin(path, manifest.CHECKPOINT))
        ranks.each(lambda: atomic_folders.require_shared(aside.folder))
        shards = _write_shards(content.state, aside.folder, ranks)

        def written() -> tuple[str, dict[str, File]]:
            files = {path.name: durable(path) for path in shards}
            if ranks.leads:
                files[REST] = _write_rest(content.rest, aside)
            atomic_folders.reached("written")
            return socket.gethostname(), files

        everyone = ranks.every(written)
        step = int(content.rest.get("global_step", -1))
        ranks.lead(lambda: _finish(aside, everyone, step, run))
    except BaseException as error:
        # Rank 0 alone: another rank may raise while rank 0 gives the folder its name.
        if aside is not None and ranks.leads:
            atomic_folders.discard(aside)
        if isinstance(error, OSError):
            raise _unsaved(path, error) from error
        raise


def _sums_of_tensors(rest: Mapping[str, Any]) -> dict[str, str]:
    """Checksums of the tensors in each entry and each callback's state (averages of weights)."""
    sums: dict[str, int] = {}
    for name, entry in (dict(rest) | dict(rest.get("callbacks", {}))).items():
        for each in tree_leaves(entry) if name != "callbacks" else ():
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
                values = each.detach().cpu().reshape(-1).view(torch.uint8)
                sums[name] = zlib.crc32(values.numpy().data, sums.get(name, 0))
    return {f"tensors in {name!r}": f"{found:08x}" for name, found in sums.items()}


def _write_rest(rest: Mapping[str, Any], aside: atomic_folders.PartialFolder) -> File:
    path = aside.folder / REST
    with _NamingFiles().create_stream(path, "wb") as file:
        torch.save({**rest, OWN: {"save": aside.save}}, file)  # type: ignore[arg-type]
    with path.open("rb") as written:
        check_archive(written)  # for limits on a whole file, as on the tuples among its keys
    return durable(path)


def _finish(
    aside: atomic_folders.PartialFolder,
    everyone: Sequence[tuple[str, Mapping[str, File]]],
    step: int,
    run: SavingRun | None,
) -> None:
    """On rank 0: list the files of ``everyone`` (a rank's host and files) and name the folder."""
    listed: dict[str, File] = {}
    for rank, (host, files) in enumerate(everyone):
        for name, file in files.items():
            if not atomic_folders.wait_for(aside.folder / name, file.size):
                raise ValueError(
                    f"{name} of {file.size:,} bytes, which rank {rank} wrote into {aside.folder} on"
                    f" {host}, is not there on {socket.gethostname()}. Use a shared file system."
                )
            listed[name] = file
    by = manifest.Saver() if run is None else run.next_save(aside.path.parent)
    made = Manifest(manifest.CHECKPOINT, aside.save, len(everyone), step, listed, by)
    manifest.write(aside.folder, made)
    atomic_folders.reached("listed")
    atomic_folders.finish(aside)


def _unsaved(path: Path, error: OSError) -> OSError:
    there = next(each for each in path.parents if each.is_dir())
    free = shutil.disk_usage(there).free
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room (df, df -i), or save elsewhere." if full else "Look at the file system."
    text = (
        f"{path} was not saved ({error}). What was written of it is removed, which leaves"
        f" {free:,} bytes free; what was there before is untouched. {remedy}"
    )
    return OSError(error.errno, text)


def check_plain(state: Any) -> None:
    """Raise ValueError, naming the keys, for a nested value that could not be read again."""
    for where, value in _leaves(state, ""):
        if type(value) not in _PLAIN and not _readable(value):
            kind = type(value)
            raise ValueError(
                f"A checkpoint cannot hold {where}: an object of {kind.__module__}.{kind.__name__}"
                " could not be read again without running code. Keep plain Python values or tensors"
                " instead: float(x), str(path), x.total_seconds(), dataclasses.asdict(x)."
            )


def _leaves(state: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Each key and each value except tensors, after a text of the keys that lead to it."""
    if type(state) is dict:
        try:
            KeyCheck()(each for each in state if type(each) in _PLAIN or isinstance(each, tuple))
        except ValueError as error:
            raise ValueError(
                f"A checkpoint cannot hold the keys of {where or 'it'}: {error}."
            ) from error
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
        load_plain(written)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


class _NamingFiles(FileSystem):
    """torch's access to files, whose errors name the file that could not be written.

    torch's writer of archives hides the disk's error behind one of its own ("unexpected pos").
    """

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        atomic_folders.reached("writing")
        handled = sys.exc_info()[1]  # a save on an exception is not caused by that exception
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except (OSError, RuntimeError) as error:
            cause: BaseException | None = error
            while cause not in (None, handled) and not isinstance(cause, OSError):
                cause = cause.__context__
            if not isinstance(cause, OSError) or cause is handled:
                raise
            cause.filename = str(path)
            raise cause from None


def _write_shards(state: dict[str, Any], folder: Path, ranks: Ranks) -> list[Path]:
    """Write this rank's shards, on rank 0 also ``.metadata``; collective. Returns the files."""
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = _NamingFiles()
    with torch_errors(RuntimeError, ranks):
        dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.alone)
    mine = [*folder.glob(f"__{ranks.rank}_*")]
    return [*mine, folder / ".metadata"] if ranks.leads else mine


@contextmanager
def torch_errors(otherwise: type[Exception], ranks: Ranks) -> Iterator[None]:
    """Turn torch's report of all ranks' stacks into the error of the first rank that failed.

    It is an OSError if that rank's disk failed, else an error of the type ``otherwise``.
    """
    try:
        with warnings.catch_warnings() if ranks.alone else nullcontext():
            # Filters hold for the whole process: it sets one only if it is alone, without threads.
            if ranks.alone:
                warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
            yield
    except CheckpointException as report:
        rank, (error, _) = min(report.failures.items())
        if not isinstance(error, Exception):
            raise error from None
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"rank {rank}: {error.strerror}", error.filename) from error
        raise otherwise(f"rank {rank}: {type(error).__name__}: {error}") from error
