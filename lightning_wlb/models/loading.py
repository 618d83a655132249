"""Modules out of checkpoints that the module's own strategy did not write.

A folder of :class:`.WLBStrategy` becomes a module in one process; and optimizer state that is keyed
by the names of parameters, as in the file that ``lightning-wlb consolidate`` writes of a folder, is
numbered as Lightning restores it, in the order that the module's own optimizers have.

Cost: the weights twice in memory, or the optimizer state twice, until the second is loaded.
"""

from __future__ import annotations

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

from lightning_wlb.checkpoints.consolidate import consolidated
from lightning_wlb.checkpoints.stored import StoredCheckpoint

_Module = TypeVar("_Module", bound=L.LightningModule)


def load_folder(
    cls: type[_Module], folder: Path, strict: bool | None, arguments: Mapping[str, Any]
) -> _Module:
    """Make a module of the arguments in a checkpoint folder and give it the weights.

    Args:
        cls: the module's class.
        folder: that WLBStrategy wrote; it is verified.
        strict: whether all weights must be there, and no others; None: what the module says.
        arguments: in place of those that were saved.

    Raises:
        ValueError: the folder is no checkpoint, or is damaged.
    """
    checkpoint = consolidated(StoredCheckpoint(folder), optimizers=False)
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(arguments)
    module = _load_state(cls, checkpoint, strict=strict, **arguments)
    assert isinstance(module, cls)
    return module


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
