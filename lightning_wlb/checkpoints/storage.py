"""torch.distributed.checkpoint's files, written durably and read without running anything in them.

The library's ``.metadata`` and the entries of shards that are not tensors are pickles, which may
call any function. Here ``.metadata`` is unpickled into plain records, of which its classes are
built again when every field has the type, and every size and position lies in the files that are
there; entries are read by ``torch.load(weights_only=True)``.

Cost: reading ``.metadata`` takes about twice as long as the library does.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_wlb.checkpoints.durable import DurableFile
from lightning_wlb.checkpoints.folders import reached
from lightning_wlb.checkpoints.manifest import File

SHARD = re.compile(r"__\d+_\d+\.distcp")
METADATA = ".metadata"


class Reader(dcp.FileSystemReader):
    """Reads a folder of shards."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds, and where."""
        return super().read_metadata(*args, **kwargs)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads entries that are not tensors without running what they hold."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry of plain types into the state."""
        plain = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


class _Files(FileSystem):
    """Durable files; knows what it has written."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise ValueError(f"{path}: {mode}")
        reached("writing")
        with DurableFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.written[Path(path).name] = File(file.size, file.sha256)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


def write_shards(
    state: dict[str, Any], folder: Path, save: str, group: dist.ProcessGroup | None
) -> dict[str, File]:
    """Write this rank's shards, and on rank 0 ``.metadata``; collective.

    Returns:
        The files that this rank has written.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = files = _Files()
    dcp.save(state, storage_writer=writer, process_group=group)
    return files.written


def read_shards(
    state: dict[str, Any],
    folder: Path,
    group: dist.ProcessGroup | None = None,
    *,
    no_dist: bool = False,
) -> None:
    """Fill the tensors of a state, and replace what else it holds, by a folder's; collective.

    Args:
        state: names to tensors and plain values, nested.
        folder: of shards.
        group: a process group; None means the default one.
        no_dist: this process reads alone.
    """
    dcp.load(
        state,
        storage_reader=Reader(folder),
        planner=LoadPlanner(),
        process_group=group,
        no_dist=no_dist,
    )
