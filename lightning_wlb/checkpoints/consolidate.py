"""A checkpoint folder as the ordinary checkpoint file of any other strategy.

The file holds what Lightning's own strategies save: whole weights, the loops, callbacks, schedulers
and the data module's state, and each optimizer's state. That is keyed by the names of parameters,
since their numbers depend on the module; a :class:`.LanguageModule` numbers it when it resumes.

Cost: the whole checkpoint in the memory of one process, and reading it twice where it is verified.
Not for weights to be used outside of Lightning: :mod:`lightning_wlb.cli.export`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_wlb.checkpoints import safe_metadata
from lightning_wlb.checkpoints.manifest import DurableFile, sync_folder
from lightning_wlb.checkpoints.reading import check, read_shards
from lightning_wlb.checkpoints.sharded import WEIGHTS
from lightning_wlb.checkpoints.writing import OWN
from lightning_wlb.distributed.collective_errors import Ranks


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
            self._stored = safe_metadata.read(path)
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


_AT_ONCE = 16


def consolidated(
    stored: StoredCheckpoint,
    optimizers: bool,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """A folder's content, in the form of a file's.

    Args:
        stored: of a folder.
        optimizers: whether their state is read too.
        report: called with the weights that are read, and all.
    """
    names, weights = sorted(stored.names), {}
    for begin in range(0, len(names), _AT_ONCE):
        weights.update(stored.read(names[begin : begin + _AT_ONCE]))
        report(len(weights), len(names))
    whole = stored.rest | {"state_dict": weights}
    states = stored.read_optimizers() if optimizers else []
    return whole | {"optimizer_states": states} if states else whole


def write_file(
    folder: Path,
    output: Path,
    *,
    force: bool = False,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Write a checkpoint folder as a file; it has its name once it is whole and on the disk.

    Args:
        folder: that :class:`.WLBStrategy` wrote; it is verified first.
        output: the file.
        force: replace a file.
        report: called with the weights that are read, and all.

    Returns:
        The bytes of the file.

    Raises:
        ValueError: ``folder`` is no such checkpoint or is damaged, or there is something at
            ``output``.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder. Give the one that WLBStrategy wrote: another strategy's"
            " checkpoint is a file already."
        )
    if output.is_dir() or (output.exists() and not force):
        remedy = "another file" if output.is_dir() else "another file, or --force to replace it"
        raise ValueError(f"{output} exists. Give {remedy}.")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"{output.absolute().parent}: there is no such folder to write to.")
    whole = consolidated(StoredCheckpoint(folder), True, report)
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with DurableFile(aside) as file:
            torch.save(whole, file)
        aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(output.absolute().parent)
    return file.size
