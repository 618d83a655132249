"""A checkpoint in one process, without process groups: its weights by name, or all as one file.

:class:`StoredCheckpoint` reads both kinds of checkpoint a few weights at a time: the folder of
:class:`.WLBStrategy`, whose shards are put together as they are read, and the single file of any
other strategy, which is mapped into memory.

:func:`write_file` makes of a folder what Lightning's own strategies save: whole weights, the loops,
callbacks, schedulers and the data module's state, and each optimizer's state. The latter is keyed
by parameter names, since their numbers depend on the module; a :class:`.LanguageModule` numbers it
when it resumes.

Cost of a file: the whole checkpoint in memory, after reading it once more to verify it. For weights
to be used outside of Lightning: :mod:`lightning_wlb.cli.export`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from lightning_wlb.checkpoints import manifest, safe_metadata
from lightning_wlb.checkpoints.manifest import DurableFile, sync_folder
from lightning_wlb.checkpoints.pickle_checks import load_plain
from lightning_wlb.checkpoints.reading import read_shards
from lightning_wlb.checkpoints.sharded import WEIGHTS
from lightning_wlb.checkpoints.writing import OWN, REST
from lightning_wlb.distributed.collective_errors import Ranks

_PREFIX = f"{WEIGHTS}."
_AT_ONCE = 16
"""Weights that are read between two reports of progress."""


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
        if folder:
            manifest.check(path)
        try:
            rest = load_plain(file, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error
        if not isinstance(rest, dict):
            raise ValueError(
                f"{path} is not a checkpoint: it holds a {type(rest).__name__}, not what a Trainer"
                " saves."
            )
        rest.pop(OWN, None)
        self.rest: dict[str, Any] = rest
        self.hyper_parameters: dict[str, Any] = rest.get("hyper_parameters", {})
        self._metadata = safe_metadata.read(path) if folder else None
        self.names = frozenset(
            rest.get("state_dict", {})
            if self._metadata is None
            else (
                name.removeprefix(_PREFIX)
                for name, entry in self._metadata.state_dict_metadata.items()
                if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
            )
        )

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read whole tensors to the CPU, in the dtype in which they are stored."""
        if self._metadata is None:
            return {name: self.rest["state_dict"][name] for name in names}
        return self._read_entries(names, _PREFIX)

    def read_optimizers(self) -> list[dict[str, Any]]:
        """Read each optimizer's state from a folder: flat, as torch's, by the names of parameters.

        The list is empty if weights only were saved.
        """
        states: list[dict[str, Any]] = []
        while True:
            prefix = f"optimizer_{len(states)}."
            names = [name for name in self._entries if name.startswith(prefix)]
            if not names:
                return states
            states.append(self._read_entries((n.removeprefix(prefix) for n in names), prefix))

    @property
    def _entries(self) -> dict[str, STORAGE_TYPES]:
        assert self._metadata is not None, "only the entries of a folder are read one by one"
        return self._metadata.state_dict_metadata

    def _read_entries(self, names: Iterable[str], prefix: str) -> dict[str, Any]:
        """Read entries of a folder's shards; ``prefix`` stands before their names there."""
        assert self._metadata is not None
        state: dict[str, Any] = {}
        for name in names:
            entry = self._entries[prefix + name]
            state[prefix + name] = None
            if isinstance(entry, TensorStorageMetadata):
                state[prefix + name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_shards(state, self._path, self._metadata, Ranks(alone=True))
        return {name.removeprefix(prefix): value for name, value in state.items()}


def consolidated(
    stored: StoredCheckpoint,
    optimizers: bool,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Read a folder's whole content, in the form in which a file holds it.

    Args:
        stored: a folder; without ``optimizers`` also a file.
        optimizers: whether to read the optimizers' state too.
        report: called with the number of weights that are read, and of all.
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
    """Write a checkpoint folder as a file, which has its name once it is whole and on the disk.

    Args:
        folder: written by :class:`.WLBStrategy`; it is verified first.
        output: the file.
        force: replace a file.
        report: called with the number of weights that are read, and of all.

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
    return file.entry.size
