"""torch.distributed.checkpoint's shards, written durably and read without running what they hold.

The library unpickles ``.metadata``, and the entries that are not tensors (an optimizer's settings),
as whatever they are, which runs code that whoever wrote them chose. Here the first is read by
:mod:`.checkpoints.metadata`, and the second as tensors are: by ``torch.load(weights_only=True)``.

Checksums are computed while files are written (:mod:`.durable`). Cost: that of the library. Not for
object stores: a path of the file system only.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_wlb.checkpoints import folders, metadata
from lightning_wlb.checkpoints.agreement import Ranks
from lightning_wlb.checkpoints.durable import DurableFile
from lightning_wlb.checkpoints.manifest import File


class Reader(dcp.FileSystemReader):
    """The library's reader of a folder of shards, but for ``.metadata``.

    Args:
        folder: of shards.
        stored: its metadata, if it is read already.
    """

    def __init__(self, folder: Path, stored: Metadata | None = None) -> None:
        super().__init__(folder)
        self._stored = stored

    # Without keyword arguments: where this raises, the library is to look for no other metadata.
    def read_metadata(self) -> Metadata:
        """What the folder holds, and where. Raises as :func:`.checkpoints.metadata.read`."""
        return metadata.read(cast(Path, self.path)) if self._stored is None else self._stored


class LoadPlanner(dcp.DefaultLoadPlanner):
    """The library's planner, but for entries that are not tensors: plain types only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry into the state that is loaded."""
        plain = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


class _DurableFiles(FileSystem):
    """The library's access to files; of those that it writes it keeps size and checksum."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "a file of a save is written once, from its beginning"
        folders.reached("writing")
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
    with _one_sentence(RuntimeError), _unwarned(ranks):
        dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.alone)
    return files.written


def read_shards(state: dict[str, Any], folder: Path, stored: Metadata, ranks: Ranks) -> None:
    """Fill the tensors of a state, and replace what else it holds; collective over ``ranks``.

    Args:
        state: names to tensors and plain values, nested.
        folder: of shards.
        stored: the folder's metadata.
        ranks: who reads.

    Raises:
        OSError: where a rank could not read, on all ranks.
        ValueError: the folder does not hold what the state asks for, or holds more than tensors
            and plain types.
    """
    with _one_sentence(ValueError), _unwarned(ranks):
        dcp.load(
            state,
            storage_reader=Reader(folder, stored),
            planner=LoadPlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )


@contextmanager
def _one_sentence(otherwise: type[Exception]) -> Iterator[None]:
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
def _unwarned(ranks: Ranks) -> Iterator[None]:
    """The library warns a process by itself that it is by itself."""
    if not ranks.alone:  # may be in a thread, and filters are the process's
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        yield
