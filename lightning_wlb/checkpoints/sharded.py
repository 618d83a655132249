"""A model's and its optimizers' state under names that are the same on any mesh.

Every rank saves its own shards of the weights and of the optimizer state. Layers are numbered
globally and optimizer state is keyed by parameter name, so that another mesh, or a single process,
reads the parts that it needs. All other state (loops, callbacks, schedulers, the data module's) is
the same on every rank: rank 0 writes it to ``meta.pt``, readable with ``weights_only=True``.

:func:`collect` gathers what :func:`.writing.write` writes; :func:`load` reads it into a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_wlb.checkpoints.reading import fill, open_checkpoint
from lightning_wlb.checkpoints.writing import CheckpointContent
from lightning_wlb.distributed.collective_errors import Ranks

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
WEIGHTS = "model"
"""The key of the weights, which Lightning's consolidate_checkpoint looks for."""
_MOVED = "lr", "initial_lr", "betas", "momentum"
"""Options of parameter groups that torch's schedules change: they may differ in a resumed run."""
_STATE = re.compile(r"optimizer_\d+\.state\.(.+)")


def collect(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    rest: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> CheckpointContent:
    """Gather the content of a checkpoint, without copying it.

    Args:
        model: this rank's part of the model.
        optimizers: empty to save weights only.
        rest: all other state, which is the same on every rank.
        renamed: this rank's parameter name -> the name in the checkpoint, if a tied weight has two.
    """
    # torch 2.11 gives an ordered dictionary, which writing.check_plain does not look into.
    state: dict[str, Any] = {WEIGHTS: dict(get_model_state_dict(model, options=_OPTIONS))}
    for index, optimizer in enumerate(optimizers):
        stepped = bool(optimizer.state)
        values = _optimizer_values(model, optimizer)
        if not stepped:
            # torch has made a state by a step without gradients, which would count as a step.
            optimizer.state.clear()
            values = {name: each for name, each in values.items() if not name.startswith("state.")}
        # The rank that knows the weight by its global name saves the same values.
        state[f"optimizer_{index}"] = {
            name: value
            for name, value in values.items()
            if not any(_mentions(name, local) for local in renamed)
        }
    return CheckpointContent(state, rest)


def load(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Read a checkpoint into the model and the optimizers, in place; collective over all ranks.

    Arguments are those of :func:`collect`; without ``optimizers`` weights only are read.

    Returns:
        The ``rest`` that :func:`collect` was given.

    Raises:
        FileNotFoundError: ``path`` is not a checkpoint.
        Damaged: it is not what was written; parts of it may be in the model already.
        ValueError: it holds weights only and there are optimizers, its weights are not those of the
            model, it has state that no optimizer keeps, or it was made to run code.
    """
    ranks = Ranks()
    path, rest, stored, listed = open_checkpoint(path, ranks)
    names = stored.state_dict_metadata
    if optimizers and not any(name.startswith("optimizer_0.") for name in names):
        raise ValueError(
            f"{path} holds weights only, so training cannot resume from it. Pass a checkpoint that"
            f" was saved without save_weights_only; or {_new_run(model, path)}"
        )
    weights: dict[str, Any] = get_model_state_dict(model, options=_OPTIONS)
    state: dict[str, Any] = {WEIGHTS: weights}
    optimizer_states: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        # With an earlier fit's gradients torch makes no optimizer state, and reads none.
        optimizer.zero_grad()
        values = _optimizer_values(model, optimizer)
        optimizer_states.append({_rename(name, renamed): each for name, each in values.items()})
        # An option of a parameter group that was not saved keeps its value: a schedule adds
        # `initial_lr`, and Lightning's search for a learning rate makes one after saving.
        state[f"optimizer_{index}"] = {
            name: each
            for name, each in optimizer_states[index].items()
            if f"optimizer_{index}.{name}" in names
            or (name.startswith("state.") and _has_state(names, index))
        }
    kept = _with_state(
        f"optimizer_{index}.{name}" for index, each in enumerate(optimizer_states) for name in each
    )
    _check_names(path, model, weights, kept if optimizers else None, names, ranks)
    fill(state, path, stored, ranks, listed)
    if optimizers:
        _tell_of_changes(path, names, state, optimizer_states, ranks)
    set_model_state_dict(model, weights, options=_OPTIONS)
    back = {there: here for here, there in renamed.items()}
    for index, optimizer in enumerate(optimizers):
        read = optimizer_states[index] | state[f"optimizer_{index}"]
        if values := {_rename(name, back): each for name, each in read.items()}:
            with _without_empty_groups(optimizer):
                set_optimizer_state_dict(model, optimizer, values, options=_OPTIONS)
            # torch casts all but `step` to the parameter's dtype, whatever the optimizer keeps.
            for name, parameter in model.named_parameters():
                for key in optimizer.state.get(parameter, {}):
                    if (value := values.get(f"state.{name}.{key}")) is not None:
                        optimizer.state[parameter][key] = value
        if not _has_state(names, index):
            optimizer.state.clear()  # saved before the first step
    return rest


def _tell_of_changes(
    path: Path,
    stored: Mapping[str, Any],
    state: Mapping[str, dict[str, Any]],
    made: Sequence[Mapping[str, Any]],
    ranks: Ranks,
) -> None:
    """Warn of weights that are rounded, and of options other than those ``made`` here; collective.

    ``state`` has the values that were read, ``stored`` the metadata of the checkpoint.
    """
    weights = state[WEIGHTS]
    rounded = [
        name
        for name, value in weights.items()
        if isinstance(there := stored.get(f"{WEIGHTS}.{name}"), TensorStorageMetadata)
        and there.properties.dtype.itemsize > value.dtype.itemsize
    ]
    if rounded:
        rank_zero_warn(
            f"{path} holds weights in a wider dtype than that of this model, and they are rounded"
            f" to it; {in_words({weights[rounded[0]].dtype: rounded})}. To go on exactly, resume"
            " with the precision of the run that saved the checkpoint."
        )
    changed = {
        f"{option} {value!r} (here {own[name]!r})"
        for index, own in enumerate(made)
        for name, value in state[f"optimizer_{index}"].items()
        if name.startswith("param_groups.")
        and (option := name.rpartition(".")[2]) not in _MOVED
        and repr(value) != repr(own[name])
    }
    if said := sorted(set().union(*ranks.every(lambda: changed))):
        rank_zero_warn(
            f"{path} brings other options of the optimizer than configure_optimizers gives here. As"
            f" in torch, they hold from here on: {', '.join(said[:8])}."
        )


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """Hide parameter groups without parameters, since torch looks up options by parameter."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    yield
    read = iter(optimizer.param_groups)
    optimizer.param_groups = [next(read) if group["params"] else group for group in groups]


def _optimizer_values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's flattened state; empty without parameters, which torch would refuse."""
    if not any(group["params"] for group in optimizer.param_groups):
        return {}
    return dict(get_optimizer_state_dict(model, optimizer, options=_OPTIONS))


def _check_names(
    path: Path,
    model: nn.Module,
    weights: Mapping[str, Any],
    kept: set[str] | None,
    stored: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Refuse a checkpoint of another model, or of optimizers of more parameters; collective.

    torch itself passes over weights that the model lacks, such as adapters that were not asked for,
    and over state that no optimizer keeps. ``kept`` names the state that this rank's optimizers
    keep; None: optimizers are not read.
    """
    prefix = f"{WEIGHTS}."
    mine = {name: tuple(getattr(value, "shape", ())) for name, value in weights.items()}
    everyone = ranks.every(lambda: (mine, kept or set()))
    wanted = {name: shape for each, _ in everyone for name, shape in each.items()}
    # A weight of no size has no metadata of a tensor.
    there = {n.removeprefix(prefix): e for n, e in stored.items() if n.startswith(prefix)}
    sizes = {n: tuple(getattr(e, "size", wanted.get(n, ()))) for n, e in there.items()}
    strict = model.strict_loading if isinstance(model, LightningModule) else True
    found = {
        "missing": sorted(set(wanted) - set(sizes)),
        "not in the model": sorted(set(sizes) - set(wanted)) if strict else [],
        "of another shape": sorted(
            name for name in set(wanted) & set(sizes) if wanted[name] != sizes[name]
        ),
    }
    if said := in_words(found):
        raise ValueError(
            f"{path} is a checkpoint of another model; {said}. Give the module the"
            " arguments that it had when the checkpoint was saved (config, lora)."
        )
    saved = set() if kept is None else _with_state(stored)
    lost = sorted(saved.difference(*(each for _, each in everyone)))
    if lost := [name for name in lost if strict or name.rpartition(".")[0] in wanted]:
        raise ValueError(
            f"{path} holds {in_words({'optimizer state': lost})}, which the optimizer made here"
            " does not keep: training would go on without it. Make the same optimizer, of all"
            " parameters that trained when it was saved: unfreeze them in build_model or"
            f" on_fit_start, before it is read. Or {_new_run(model, path)}"
        )


def in_words(found: Mapping[Any, Sequence[str]]) -> str:
    """A text of names by what is wrong with them, three of each; empty if nothing is wrong."""
    return "; ".join(
        f"{what}: {', '.join(each[:3])}{f' and {len(each) - 3} more' if len(each) > 3 else ''}"
        for what, each in found.items()
        if each
    )


def _new_run(model: nn.Module, path: Path) -> str:
    name = type(model).__name__
    return f"start a new run from its weights: {name}.load_from_checkpoint({str(path)!r})."


def _with_state(names: Iterable[str]) -> set[str]:
    """The optimizer state among the names of shards, as ``PARAMETER.exp_avg``."""
    return {found[1] for name in names if (found := _STATE.fullmatch(name))}


def _has_state(names: Mapping[str, Any], index: int) -> bool:
    """Whether the checkpoint with these names holds state that steps of an optimizer made."""
    return any(name.startswith(f"optimizer_{index}.state.") for name in names)


def _mentions(key: str, parameter: str) -> bool:
    """Whether a flattened optimizer key like ``state.<name>.exp_avg`` belongs to a parameter."""
    return f".{parameter}." in key


def _rename(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if _mentions(key, old):
            return key.replace(f".{old}.", f".{new}.")
    return key
