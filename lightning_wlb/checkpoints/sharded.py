"""Checkpoints that any mesh can read: torch.distributed.checkpoint with global names.

A checkpoint is a folder. Every rank writes its own shards of the weights and of the optimizer
state under names that do not depend on the mesh (layers are numbered globally, optimizer state is
keyed by parameter name), so that another mesh, or a single process, reads the parts that it needs.
Everything else of Lightning's checkpoint (loops, callbacks, schedulers, the data module's state)
is the same on every rank: rank 0 writes it to ``meta.pt``, readable with ``weights_only=True``.

How the folder is written and read, whole and undamaged or not at all:
:mod:`.checkpoints.writing` and :mod:`.checkpoints.reading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_wlb.checkpoints.reading import fill, open_checkpoint
from lightning_wlb.checkpoints.writing import Parts, write
from lightning_wlb.distributed.collective_errors import Ranks

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# Lightning's consolidate_checkpoint looks for this key.
WEIGHTS = "model"


def save(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    rest: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> None:
    """Write a checkpoint, by :func:`collect` and :func:`.writing.write`; collective."""
    write(path, collect(model, optimizers, rest, renamed))


def collect(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    rest: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> Parts:
    """Gather what a checkpoint consists of.

    Args:
        model: this rank's part of the model.
        optimizers: with parameters of ``model``; empty to save weights only.
        rest: what else belongs to the checkpoint.
        renamed: this rank's parameter name -> the name in the checkpoint, for the tied weight
            that a single process knows by its other name.
    """
    # torch 2.11 has an ordered dictionary, which is not looked into where state is checked.
    state: dict[str, Any] = {WEIGHTS: dict(get_model_state_dict(model, options=_OPTIONS))}
    for index, optimizer in enumerate(optimizers):
        stepped = bool(optimizer.state)
        values = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        if not stepped:
            # torch has made a state, by a step without gradients that would count as one of ours.
            optimizer.state.clear()
            values = {name: each for name, each in values.items() if not _is_state(name)}
        # The rank that knows the weight by its global name saves the same values.
        state[f"optimizer_{index}"] = {
            name: value
            for name, value in values.items()
            if not any(_mentions(name, local) for local in renamed)
        }
    return Parts(state, rest)


def load(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    renamed: Mapping[str, str],
    weights_only: bool | None,
    *,
    verify: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint into the model and the optimizers, in place; collective over all ranks.

    Where a save died while it replaced ``path``, the older checkpoint is read, with a warning.

    Args:
        path: the folder.
        model: this rank's part of the model.
        optimizers: with parameters of ``model``; empty to read weights only.
        renamed: as in :func:`save`.
        weights_only: for ``meta.pt``; None means True.
        verify: compare all files with the manifest, and not only their sizes.

    Returns:
        What :func:`save` was given as ``rest``.

    Raises:
        FileNotFoundError: if the folder is not there or is not such a checkpoint.
        Damaged: if it is not what was written; the model is not what it was either.
        ValueError: if there are optimizers and the checkpoint holds weights only, if its weights
            are not those of the model, or if it was made to run code.
    """
    ranks = Ranks()
    opened = open_checkpoint(path, weights_only, verify, ranks)
    path, names = opened.folder, opened.stored.state_dict_metadata
    if optimizers and not any(name.startswith("optimizer_0.") for name in names):
        raise ValueError(
            f"{path} holds weights only, so training cannot resume from it. Pass a checkpoint that"
            " was saved without save_weights_only; or start a new run from these weights:"
            f" {type(model).__name__}.load_from_checkpoint({str(path)!r})."
        )
    weights = get_model_state_dict(model, options=_OPTIONS)
    _check_weights(path, model, weights, names)
    state: dict[str, Any] = {WEIGHTS: weights}
    optimizer_states: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        # Gradients that an earlier fit of the same module has left: torch would take an optimizer
        # beside them for one without state, and none would be read.
        optimizer.zero_grad()
        values = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        optimizer_states.append({_rename(name, renamed): each for name, each in values.items()})
        # An option of a parameter group that the saved run did not have keeps its value: a schedule
        # adds `initial_lr`, that of Lightning's search for a learning rate after saving.
        state[f"optimizer_{index}"] = {
            name: each
            for name, each in optimizer_states[index].items()
            if f"optimizer_{index}.{name}" in names
            or (_is_state(name) and _has_state(names, index))
        }
    fill(state, opened, verify, ranks)
    set_model_state_dict(model, weights, options=_OPTIONS)
    back = {there: here for here, there in renamed.items()}
    for index, optimizer in enumerate(optimizers):
        read = optimizer_states[index] | state[f"optimizer_{index}"]
        values = {_rename(name, back): each for name, each in read.items()}
        set_optimizer_state_dict(model, optimizer, values, options=_OPTIONS)
        if not _has_state(names, index):
            optimizer.state.clear()  # saved before the first step
    return opened.rest


def _check_weights(
    path: Path, model: nn.Module, weights: Mapping[str, Any], stored: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of another model; collective over all ranks.

    torch itself passes over what the model lacks, as adapters that it is not asked for.

    Raises:
        ValueError: naming what is missing, too much or of another shape; the same on every rank.
    """
    prefix = f"{WEIGHTS}."
    there = {
        name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)
    }
    mine = {name: tuple(getattr(value, "shape", ())) for name, value in weights.items()}
    shares = [mine]
    if dist.is_initialized():
        shares = [{}] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
    wanted = {name: shape for share in shares for name, shape in share.items()}
    # A weight of no size has no metadata of a tensor.
    sizes = {
        name: tuple(getattr(each, "size", wanted.get(name, ()))) for name, each in there.items()
    }
    strict = getattr(model, "strict_loading", True)
    found = {
        "missing": sorted(set(wanted) - set(sizes)),
        "not in the model": sorted(set(sizes) - set(wanted)) if strict else [],
        "of another shape": sorted(
            name for name in set(wanted) & set(sizes) if wanted[name] != sizes[name]
        ),
    }
    said = [
        f"{what}: {', '.join(each[:3])}{f' and {len(each) - 3} more' if len(each) > 3 else ''}"
        for what, each in found.items()
        if each
    ]
    if said:
        raise ValueError(
            f"{path} is a checkpoint of another model; {'; '.join(said)}. Give the module the"
            " arguments that it had when the checkpoint was saved (config, lora)."
        )


def _is_state(key: str) -> bool:
    """Whether a flattened optimizer key is what steps have left, and no option of a group."""
    return key.startswith("state.")


def _has_state(names: Mapping[str, Any], index: int) -> bool:
    """Whether the checkpoint with these names holds what steps of an optimizer have left."""
    return any(name.startswith(f"optimizer_{index}.state.") for name in names)


def _mentions(key: str, parameter: str) -> bool:
    """Whether a flattened optimizer key belongs to a parameter: ``state.<name>.exp_avg``."""
    return f".{parameter}." in key


def _rename(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if _mentions(key, old):
            return key.replace(f".{old}.", f".{new}.")
    return key
