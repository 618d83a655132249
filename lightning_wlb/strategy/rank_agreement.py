"""Compares the settings and values that all ranks of a run must share; the error names differences.

A rank with another learning rate, seed or clipping would silently train a wrong model; a rank with
other intervals or another precision would wait for the others, or abort. A fact is a short text
under a name, and all ranks that have a fact must have the same text. Facts are compared as soon as
the ranks are connected (:func:`settings_of`). Before the first step (:func:`training_of`) they are
compared again, with optimizers, schedules, and checksums of values that several ranks hold. Data-
and context-parallel ranks hold different parts of a parameter. To check these parts the seed, and a
sample of the files of pretrained weights, are compared.

Options of optimizers can drift apart later, for example if ReduceLROnPlateau follows one rank's
metric. So each step's exchange has a digest of them; if it differs, all facts are compared again.

Not compared: paths except for their last name; progress bars, monitors, loggers and the user's own
callbacks, which may be on one rank only; documents (:mod:`lightning_wlb.data.store_checks`).

Cost: two exchanges of some kilobytes per rank, some milliseconds; the first ``SAMPLED`` values of
each parameter with copies are read. In each step some microseconds per parameter group.
"""

from __future__ import annotations

import hashlib
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from inspect import signature
from numbers import Number
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_wlb.distributed.collective_errors import Ranks, differences
from lightning_wlb.file_checks import open_regular
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.checks import data_module_of
from lightning_wlb.training.executor import Executor

SAMPLED = 1 << 16
"""How many values of a parameter, and bytes at each end of a file, are compared."""

_TRAINER = (
    *("max_steps", "max_epochs", "min_steps", "min_epochs", "overfit_batches", "fast_dev_run"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "num_sanity_val_steps"),
    *("val_check_interval", "check_val_every_n_epoch", "reload_dataloaders_every_n_epochs"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision"),
)
_SAVING = ("save_top_k", "save_last", "save_weights_only", "save_on_exception")


def compare_ranks(facts: Callable[[], Mapping[str, str]]) -> None:
    """Compare the facts of all ranks, and name what differs; collective."""
    differ = differences(Ranks().every(facts))
    if differ:
        more = f" And {len(differ) - 6} more." if len(differ) > 6 else ""
        raise MisconfigurationException(
            f"The ranks of this run were not given the same. {' '.join(differ[:6])}{more} Run the"
            " same program with the same arguments, versions and files on all of them, and let"
            " schedules follow what is the same on all (self.log(..., sync_dist=True))."
        )


def settings_of(trainer: pl.Trainer) -> dict[str, str]:
    """The facts about a run's settings, except for those by which its mesh is chosen."""
    module, data = trainer.lightning_module, data_module_of(trainer)
    strategy: Any = trainer.strategy  # WLBStrategy, which imports this
    facts: dict[str, Any] = {
        "Python": platform.python_version(),
        **{f"version of {each.__name__}": each.__version__ for each in (torch, pl, np)},
        "lightning_wlb": _own_files(),
        "reduce_dtype": strategy.reduce_dtype,
        "dynamic": strategy.planning.asked,
        "overlap": strategy.overlap,
        "timeout": strategy.processes.timeout.total_seconds(),
        "on_nonfinite": strategy.guard.on_nonfinite,
        "async_save": strategy.checkpoints.async_save,
        "what is run": trainer.state.fn,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        **{name: getattr(trainer, name, None) for name in _TRAINER},
        "callbacks": [*_callbacks(trainer)],
        "module": type(module).__name__,
    }
    if isinstance(module, LanguageModule):
        known = signature(LanguageModule.__init__).parameters
        facts |= {name: each for name, each in module.hparams.items() if name in known}
        facts["seed of initial values"] = module.initial_seed
    # The folder of a name on the hub is known when the weights have been opened.
    if folder := getattr(module, "weights_folder", None) or getattr(module, "pretrained", None):
        facts["files of pretrained weights"] = _ends_of_files(Path(folder))
    if data is not None:
        facts |= {f"data {name}": each for name, each in vars(data.settings).items()}
        facts["sharding"] = data.sharding
    return {name: _text(each) for name, each in facts.items()}


def training_of(module: LanguageModule, executor: Executor) -> dict[str, str]:
    """The facts about training: settings, optimizers, schedules, values with copies."""
    trainer, place = module.trainer, executor.pipeline.rank
    parameters = dict(executor.model.named_parameters())
    # Another stage has other parameters, which may have settings of their own.
    here = f" on pipeline rank {place.pipeline}" if place.mesh.pipeline > 1 else ""
    own = [(name, each.shape, each.requires_grad) for name, each in parameters.items()]
    facts: dict[str, Any] = {f"parameters{here}": own}
    group_of: dict[int, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        of, groups = f"optimizer {number}", optimizer.param_groups
        facts[of] = type(optimizer).__name__
        facts |= {f"default {key} of {of}": each for key, each in optimizer.defaults.items()}
        for key in groups[0] if groups else ():
            given = [len(group[key]) if key == "params" else group.get(key) for group in groups]
            facts[f"{key} of the groups of {of}{here}"] = given
        group_of |= {id(each): group for group in groups for each in group["params"]}
    for number, each in enumerate(trainer.lr_scheduler_configs):
        of = f"learning rate schedule {number}"
        facts[of] = type(each.scheduler).__name__, each.interval, each.frequency
        facts[f"state of {of}{here}"] = each.scheduler.state_dict()
    for head, embedding in executor.model.tied.items():
        for weight in (parameters[end] for end in (embedding, head) if end in parameters):
            at = place.data, place.context, place.tensor
            settings = group_of.get(id(weight), {})
            facts[f"settings of the tied {embedding}"] = {**settings, "params": None}
            facts[f"values of the tied {embedding} at {at}"] = _checksum([weight])
    shards = [each for each in parameters.values() if isinstance(each, DTensor)]
    if copies := [each for each in shards if any(at.is_replicate() for at in each.placements[1:])]:
        at = place.data, place.pipeline, place.context
        facts[f"values that tensor-parallel ranks at {at} share"] = _checksum(copies)
    return settings_of(trainer) | {name: _text(each) for name, each in facts.items()}


def digest_of(optimizers: Iterable[Optimizer]) -> int:
    """A digest, as one number, of the optimizers' options that a schedule may change.

    Tensors on a device are left out: reading them would wait for it.
    """
    groups = [group for each in optimizers for group in each.param_groups]
    settings = ((key, each) for group in groups for key, each in group.items() if key != "params")
    values = [
        (key, float(value))
        for key, each in settings
        for value in (each if isinstance(each, tuple) else (each,))
        if isinstance(value, int | float)
        or (isinstance(value, Tensor) and value.is_cpu and value.numel() == 1)
    ]
    return zlib.crc32(repr(values).encode())


def _callbacks(trainer: pl.Trainer) -> Iterator[str]:
    """Callbacks that may communicate: ours, and Lightning's except progress bars and monitors."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        room, _, _ = type(each).__module__.partition(".")
        shows = isinstance(each, ProgressBar) or type(each).__name__.endswith("Monitor")
        if room == "lightning_wlb" or (room == "lightning" and not shows):
            saving = {name: getattr(each, name) for name in _SAVING if hasattr(each, name)}
            yield f"{each.state_key} {saving or ''}".rstrip()


@cache
def _own_files() -> str:
    """The version of this package, by the sizes of its files."""
    sizes = [path.stat().st_size for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return f"{len(sizes)} files ({_digest(repr(sizes))})"


def _ends_of_files(folder: Path) -> str:
    """A digest of both ends of the first and the last file of weights in a folder."""
    files, found = sorted(folder.glob("*.safetensors")), b""
    for path in (*files[:1], *files[-1:]):
        with open_regular(path) as file:
            for begin in (0, max(path.stat().st_size - SAMPLED, 0)):
                file.seek(begin)
                found += file.read(SAMPLED)
    return f"{len(files)} files ({zlib.crc32(found):08x})"


def _checksum(parameters: Iterable[Tensor]) -> str:
    found = 0
    for each in parameters:
        local = each.to_local() if isinstance(each, DTensor) else each
        values = local.detach().reshape(-1)[:SAMPLED].cpu().view(torch.uint8)
        found = zlib.crc32(values.numpy().data, found)
    return f"{found:08x}"


def _text(value: Any) -> str:
    """A setting as a text that is the same on all ranks; a long text is cut, with a digest."""
    said = _plain(value)
    return said if len(said) < 200 else f"{said[:150]}... ({_digest(said)})"


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() < 9 else [*value.shape]
    if isinstance(value, str):
        return os.path.basename(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    plain = isinstance(value, Number | Enum | torch.dtype | None) or is_dataclass(value)
    return str(value) if plain else type(value).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
