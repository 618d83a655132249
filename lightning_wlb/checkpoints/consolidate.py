"""A checkpoint folder as the ordinary checkpoint file of any other strategy.

The file holds what Lightning's own strategies save: whole weights, the loops, callbacks, schedulers
and the data module's state, and each optimizer's state. That is keyed by the names of parameters,
since their numbers depend on the module; a :class:`.LanguageModule` numbers it when it resumes.

Cost: the whole checkpoint in the memory of one process, and reading it twice where it is verified.
Not for weights to be used outside of Lightning: :mod:`lightning_wlb.cli.export`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_wlb.checkpoints.durable import DurableFile, sync_folder
from lightning_wlb.checkpoints.stored import StoredCheckpoint

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
