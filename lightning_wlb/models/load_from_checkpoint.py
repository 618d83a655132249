"""Modules out of checkpoints that the module's own strategy did not write.

A folder of :class:`.WLBStrategy` becomes a module in one process; and optimizer state that is keyed
by the names of parameters, as in the file that ``lightning-wlb consolidate`` writes of a folder, is
numbered as Lightning restores it, in the order that the module's own optimizers have.

A checkpoint of a run of LightningCLI says which class the module is of, and that LightningCLI is to
make it, which imports and makes whatever other classes the arguments name. Here only a class is
taken that is imported and a kind of the one that was asked for, and it gets the arguments as they
are.

Cost: the weights twice in memory, or the optimizer state twice, until the second is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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

from lightning_wlb.checkpoints.consolidate import StoredCheckpoint, consolidated

_Module = TypeVar("_Module", bound=L.LightningModule)

INSTANTIATOR = "_instantiator"
"""Under which LightningCLI puts into hyperparameters that it is to make the module."""
NOTHING_IMPORTED: dict[str, Any] = {INSTANTIATOR: None}
"""An argument of Lightning's load_from_checkpoint: the class is called as it is."""


def load_stored(
    cls: type[_Module], path: Path, strict: bool | None, arguments: Mapping[str, Any]
) -> _Module:
    """Make a module of the arguments in a checkpoint and give it the weights.

    Args:
        cls: the module's class.
        path: the folder that WLBStrategy wrote, which is verified, or another strategy's file.
        strict: whether all weights must be there, and no others; None: what the module says.
        arguments: in place of those that were saved; with those of :data:`NOTHING_IMPORTED`.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    checkpoint = consolidated(StoredCheckpoint(path), optimizers=False)
    given = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    made = _imported(cls, str(given.pop("_class_path", "")))
    given.update(arguments)
    module = _load_state(made, checkpoint, strict=strict, **arguments)
    assert isinstance(module, cls)
    return module


def is_of_cli(path: Path, hparams_file: Any) -> bool:
    """Whether there is a file whose arguments LightningCLI saved, and no other file has others.

    Raises:
        ValueError: it cannot be read.
    """
    if hparams_file is not None or not path.is_file():
        return False
    return INSTANTIATOR in StoredCheckpoint(path).hyper_parameters


def _imported(cls: type[_Module], name: str) -> type[_Module]:
    """The class of a name, if it is imported and a kind of ``cls``; else ``cls``."""
    module, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    return found if isinstance(found, type) and issubclass(found, cls) else cls


def numbered(
    module: L.LightningModule, states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Optimizer states with numbers for parameters; those that have them already as they are.

    Args:
        module: attached to a Trainer, with its whole model.
        states: of a checkpoint, one for each optimizer.
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
