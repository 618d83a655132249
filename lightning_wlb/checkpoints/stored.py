"""The weights in a checkpoint, read a few at a time by one process without process groups.

For what goes on with a checkpoint elsewhere. Both kinds of checkpoint are read: the folder of
:class:`.WLBStrategy`, whose shards are put together as they are read, and the single file of any
other strategy, which is mapped into memory.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_wlb.checkpoints.sharded import WEIGHTS


class StoredCheckpoint:
    """A checkpoint's hyperparameters, and its weights by name.

    Args:
        path: a folder or a file.

    Attributes:
        hyper_parameters: of the module.
        names: of the module's parameters and buffers.

    Raises:
        ValueError: it is no checkpoint, or one that needs more than plain types to be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        self._shapes: dict[str, TensorStorageMetadata] = {}
        meta = path / _METADATA_FILENAME
        if (path.is_dir() and not meta.is_file()) or not path.exists():
            raise ValueError(
                f"{path} is not a checkpoint: it should be the folder that WLBStrategy wrote, with"
                f" {_METADATA_FILENAME} in it, or the file that another strategy wrote."
            )
        try:
            rest = torch.load(
                meta if path.is_dir() else path, map_location="cpu", weights_only=True, mmap=True
            )
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error
        if not isinstance(rest, dict):
            raise ValueError(
                f"{path} is not a checkpoint: it holds a {type(rest).__name__}, not what a Trainer"
                " saves."
            )
        if path.is_dir():
            self._reader = dcp.FileSystemReader(path)
            prefix = f"{WEIGHTS}."
            self._shapes = {
                name.removeprefix(prefix): stored
                for name, stored in self._reader.read_metadata().state_dict_metadata.items()
                if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
            }
        else:
            self._tensors = rest.get("state_dict", {})
        self.hyper_parameters: dict[str, Any] = rest.get("hyper_parameters", {})
        self.names = frozenset(self._shapes or self._tensors)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, as they are stored."""
        if not self._shapes:
            return {name: self._tensors[name] for name in names}
        values = {
            name: torch.empty(self._shapes[name].size, dtype=self._shapes[name].properties.dtype)
            for name in names
        }
        state = {f"{WEIGHTS}.{name}": value for name, value in values.items()}
        with warnings.catch_warnings():
            # That no process group is there, which no_dist says.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=self._reader, no_dist=True)
        return values
