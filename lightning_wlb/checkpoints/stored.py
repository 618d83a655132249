"""The weights in a checkpoint, read a few at a time by one process without process groups.

For what goes on with a checkpoint elsewhere. Both kinds of checkpoint are read: the folder of
:class:`.WLBStrategy`, whose shards are put together as they are read, and the single file of any
other strategy, which is mapped into memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_wlb.checkpoints import metadata
from lightning_wlb.checkpoints.agreement import Ranks
from lightning_wlb.checkpoints.reading import check
from lightning_wlb.checkpoints.sharded import WEIGHTS
from lightning_wlb.checkpoints.storage import read_shards
from lightning_wlb.checkpoints.writing import OWN


class StoredCheckpoint:
    """A checkpoint's hyperparameters, and its weights by name.

    Args:
        path: a folder, whose files are compared with its manifest first, or a file.

    Attributes:
        hyper_parameters: of the module.
        rest: what is not in shards; of a file all that it holds.
        names: of the module's parameters and buffers.

    Raises:
        ValueError: it is no checkpoint, is damaged, or needs more than plain types to be read.
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
        if path.is_dir():
            check(path)
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
            self._stored = metadata.read(path)
            prefix = f"{WEIGHTS}."
            self._shapes = {
                name.removeprefix(prefix): stored
                for name, stored in self._stored.state_dict_metadata.items()
                if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
            }
        else:
            self._tensors = rest.get("state_dict", {})
        rest.pop(OWN, None)
        self.rest: dict[str, Any] = rest
        self.hyper_parameters: dict[str, Any] = rest.get("hyper_parameters", {})
        self.names = frozenset(self._shapes or self._tensors)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, as they are stored."""
        if not self._shapes:
            return {name: self._tensors[name] for name in names}
        prefix = f"{WEIGHTS}."
        read = self._entries(prefix + name for name in names)
        return {name.removeprefix(prefix): value for name, value in read.items()}

    def read_optimizers(self) -> list[dict[str, Any]]:
        """The state of each optimizer of a folder, by the names of parameters; flat, as torch's.

        Empty where weights only were saved.
        """
        stored = self._stored.state_dict_metadata
        states: list[dict[str, Any]] = []
        while names := [name for name in stored if name.startswith(f"optimizer_{len(states)}.")]:
            prefix = f"optimizer_{len(states)}."
            read = self._entries(names)
            states.append({name.removeprefix(prefix): value for name, value in read.items()})
        return states

    def _entries(self, names: Iterable[str]) -> dict[str, Any]:
        """Entries of a folder's shards, under their whole names."""
        state: dict[str, Any] = {}
        for name in names:
            stored = self._stored.state_dict_metadata[name]
            state[name] = None
            if isinstance(stored, TensorStorageMetadata):
                state[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        read_shards(state, self._path, self._stored, Ranks(alone=True))
        return state
