"""``LanguageModule.load_from_checkpoint``, and optimizer state from another strategy's checkpoint.

A folder that :class:`.WLBStrategy` wrote becomes a module in one process. Optimizer state that is
keyed by the names of parameters, as in the file that Lightning's ``consolidate_checkpoint`` makes
of a folder, is numbered in the order of the module's own optimizers, as Lightning restores it.

The checkpoint of a run of LightningCLI says which class the module is of, and that LightningCLI is
to make it, which would import and make whatever other classes the arguments name. Here only a
class is taken that is imported already and a subclass of the one that was asked for, and it gets
the arguments as they are.

Cost: the weights twice in memory, or the optimizer state twice, until the second is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as L
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.core.saving import _load_state
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint

_Module = TypeVar("_Module", bound=L.LightningModule)

_INSTANTIATOR = "_instantiator"  # LightningCLI's hyperparameter: it is to make the module


def load_module(
    cls: type[_Module],
    by_lightning: Callable[..., Any],
    checkpoint: Any,
    map_location: Any,
    hparams_file: Any,
    strict: bool | None,
    weights_only: bool | None,
    arguments: dict[str, Any],
) -> _Module:
    """A module of a class with the weights of a checkpoint.

    The arguments from ``checkpoint`` on are those of :meth:`.LanguageModule.load_from_checkpoint`.
    ``by_lightning`` is Lightning's method of that name, for files that LightningCLI did not write.

    Raises:
        ValueError: a folder that is no checkpoint, is damaged, or was given with what is for files
            only.
    """
    local = isinstance(checkpoint, str | Path)
    path = Path(checkpoint).expanduser() if local else None
    folder = path is not None and path.is_dir()
    if folder and (hparams_file is not None or weights_only is False):
        raise ValueError(
            f"hparams_file={hparams_file!r}, weights_only={weights_only}: {checkpoint} is a folder,"
            " which holds plain types and its own hyperparameters. Leave both out, and give"
            " arguments that are to be others by name."
        )
    if weights_only is not False:
        # Lightning would choose False for an address, and call LightningCLI where a file says so.
        weights_only, arguments = True, arguments | {_INSTANTIATOR: None}
    by_cli = (
        path is not None
        and path.is_file()
        and weights_only
        and hparams_file is None
        and _INSTANTIATOR in StoredCheckpoint(path).hyper_parameters
    )
    if path is not None and (folder or by_cli):
        module = _load_stored(cls, path, strict, arguments)
        return module if map_location is None else module.to(map_location)
    loaded: _Module = by_lightning(
        checkpoint, map_location, hparams_file, strict, weights_only, **arguments
    )
    return loaded


def _load_stored(
    cls: type[_Module], path: Path, strict: bool | None, arguments: Mapping[str, Any]
) -> _Module:
    stored = StoredCheckpoint(path)
    checkpoint = stored.rest | {"state_dict": stored.read(stored.names)}
    given = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    # Only a class that is imported already, and a subclass, takes the place of the one asked for.
    module_name, _, class_name = str(given.pop("_class_path", "")).rpartition(".")
    found = getattr(sys.modules.get(module_name), class_name, None)
    made = found if isinstance(found, type) and issubclass(found, cls) else cls
    given.update(arguments)
    module = _load_state(made, checkpoint, strict=strict, **arguments)
    assert isinstance(module, cls)
    return module


def numbered(
    module: L.LightningModule, states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A checkpoint's optimizer states with numbers for parameters in place of names, if it has any.

    The module must be attached to a Trainer and have its whole model.
    """
    if all("state" in each for each in states):
        return [dict(each) for each in states]
    optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for optimizer, state in zip(optimizers, states, strict=True):
        # Saved before the first step: there are options of its groups, and no state yet.
        stepped = any(name.startswith("state.") for name in state)
        own = {} if stepped else get_optimizer_state_dict(module, optimizer, options=options)
        set_optimizer_state_dict(module, optimizer, own | dict(state), options=options)
        if not stepped:
            optimizer.state.clear()
    return [each.state_dict() for each in optimizers]
