"""The weights of a checkpoint by name, in one process, without process groups.

:class:`StoredCheckpoint` reads both kinds of checkpoint a few weights at a time: the folder of
:class:`.WLBStrategy`, whose shards are put together as they are read, and the single file of any
other strategy, which is mapped into memory. (Lightning's ``consolidate_checkpoint`` makes such a
file of a folder, and runs whatever its pickles name.)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_wlb.checkpoints import manifest, safe_metadata
from lightning_wlb.checkpoints.pickle_checks import load_state
from lightning_wlb.checkpoints.reading import fill
from lightning_wlb.checkpoints.sharded import WEIGHTS
from lightning_wlb.checkpoints.writing import OWN, REST
from lightning_wlb.distributed.collective_errors import Ranks

_PREFIX = f"{WEIGHTS}."


class StoredCheckpoint:
    """A checkpoint's hyperparameters, and its weights by name.

    Args:
        path: a folder, whose files are compared with its manifest first, or a file.

    Attributes:
        hyper_parameters: the module's.
        rest: the state of a folder that is not in shards, or all that a file holds.
        names: of the module's parameters and buffers.

    Raises:
        ValueError: it is not a checkpoint, is damaged, or holds more than tensors and plain types.
    """

    def __init__(self, path: Path) -> None:
        self._path, folder = path, path.is_dir()
        file = path / REST if folder else path
        if not file.is_file():
            raise ValueError(
                f"{path} is not a checkpoint: it should be the folder that WLBStrategy wrote, with"
                f" {REST} in it, or the file that another strategy wrote."
            )
        self._listed = manifest.check(path) if folder else None
        self._open = None if folder else file.open("rb")
        self._written = self._last_written()
        self.rest = rest = load_state(file, mmap=True)
        rest.pop(OWN, None)
        self.hyper_parameters: dict[str, Any] = rest.get("hyper_parameters", {})
        self._metadata = safe_metadata.read(path) if folder else None
        entries = {} if self._metadata is None else self._metadata.state_dict_metadata
        self._tensors = {
            name.removeprefix(_PREFIX): entry
            for name, entry in entries.items()
            if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        self.names = frozenset(self._tensors if folder else rest.get("state_dict", {}))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read whole tensors to the CPU, in the dtype in which they are stored."""
        if self._metadata is None or self._listed is None:
            # Copied first: a save across file systems writes into the file that is mapped.
            read = copy.deepcopy({name: self.rest["state_dict"][name] for name in names})
            if self._last_written() != self._written:
                raise manifest.Damaged(
                    f"{self._path} was replaced while it was read. Read it again."
                )
            return read
        there = {name: self._tensors[name] for name in names}
        state: dict[str, Any] = {
            _PREFIX + name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in there.items()
        }
        fill(state, self._path, self._metadata, Ranks(alone=True), self._listed, compare=False)
        return {name: state[_PREFIX + name] for name in there}

    def _last_written(self) -> tuple[int, ...]:
        status = None if self._open is None else os.fstat(self._open.fileno())
        return () if status is None else (status.st_size, status.st_mtime_ns)
