"""``LanguageModule.load_from_checkpoint``, and optimizer state from another strategy's checkpoint.

A folder that :class:`.WLBStrategy` wrote becomes a module in one process. Lightning restores
optimizer state by parameter numbers. State that is keyed by parameter names, as in the file that
Lightning's ``consolidate_checkpoint`` makes, is numbered in the order of the module's optimizers.

A checkpoint of LightningCLI names the module's class and lets LightningCLI instantiate it, which
would import and call any classes that the arguments name. Here the class must already be imported
and be a subclass of the class on which the method is called, and it gets the arguments unchanged.

Cost: weights, or optimizer state, are in memory twice until the module has loaded them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning.pytorch as L
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from lightning_wlb.data.trainer_guards import refuse_evaluated
from lightning_wlb.models.decoder import STORED, StoredWeights


class LoadsCheckpoints(L.LightningModule):
    """A module that loads what any strategy has written."""

    describing: ClassVar[frozenset[str]] = frozenset()
    """Fields of ``config`` that do not affect what the model computes."""

    def compare_config(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint was saved with another config."""
        saved = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        configs = [each.get("config") for each in (saved, self.hparams)]
        # A user's module may have saved its argument unchanged, such as a preset's name.
        before, now = (each if isinstance(each, dict) else {} for each in configs)
        changed = {
            field: (before[field], value)
            for field, value in now.items()
            if field in before and before[field] != value and field not in self.describing
        }
        if changed:
            raise ValueError(
                "the checkpoint is of a model with another config, here as (then, now):"
                f" {changed}. Resume with the config of the checkpoint. For a new run with another"
                " give it to load_from_checkpoint; with a Hugging Face model's, export the"
                " checkpoint, change config.json and start from it by pretrained."
            )

    def require_position(self, checkpoint: dict[str, Any]) -> None:
        """Raise an error if weights are not of their steps, or documents lack a position."""
        if "evaluated" in checkpoint:
            refuse_evaluated()
        data = getattr(self.trainer, "datamodule", None)
        name = type(data).__qualname__
        position = (checkpoint.get(name) or {}).get("planner", data)
        begun = position is None and checkpoint.get("global_step")  # only an edit can lead to this
        if data is not None and (begun or position is data):
            raise ValueError(
                f"the checkpoint has no position in the documents of a {name}, the class name by"
                " which Lightning looks it up: documents would be repeated. Resume with the data"
                " module's class, of the same name, with which the checkpoint was saved."
            )

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> Self:
        """A module with the weights of a checkpoint, in this one process.

        Args:
            checkpoint_path: a folder of ``WLBStrategy`` (any mesh), or another strategy's file.
            map_location: a device; None means the CPU.
            hparams_file: for a file only.
            strict: whether the weights must be exactly the module's; None: as the module says.
            weights_only: for a file only. None means True: only plain types and tensors are read,
                as always from a folder, and no class is imported.
            options: arguments of the module that replace the saved ones.

        Raises:
            ValueError: there is no checkpoint, it is damaged, a folder is given with arguments for
                files, or the checkpoint describes a far larger model than it holds.
        """
        local = isinstance(checkpoint_path, str | Path)
        path = Path(checkpoint_path).expanduser() if local else None
        plain = weights_only is not False and hparams_file is None
        if path is not None and path.is_dir() and not plain:
            raise ValueError(
                f"hparams_file={hparams_file!r}, weights_only={weights_only}: {path} is a folder,"
                " which holds plain types and its own hyperparameters. Leave both out, and give"
                " changed arguments by name."
            )
        if weights_only is not False:
            options = options | {"_instantiator": None}  # else LightningCLI would make the module
        if path is None or not path.exists() or not plain:
            # Lightning would choose weights_only=False for an address.
            weights_only = weights_only is not False
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, weights_only, **options
            )
        read = StoredCheckpoint(path)
        stored = read.rest | {"state_dict": read.read(read.names)}
        given = stored.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
        module_name, _, class_name = str(given.pop("_class_path", "")).rpartition(".")
        # Not getattr, which would make transformers import one of its modules.
        found = vars(sys.modules.get(module_name, sys)).get(class_name)
        made = found if isinstance(found, type) and issubclass(found, cls) else cls
        given.update(options)
        state = stored["state_dict"]
        token = STORED.set(StoredWeights(_values(state.values()), frozenset(state)))
        try:
            module = _load_state(made, stored, strict=strict, **options)
        finally:
            STORED.reset(token)
        assert isinstance(module, cls)
        return module if map_location is None else module.to(map_location)


def _values(state: Iterable[Any]) -> int:
    """The number of stored values; values that tensors share or repeat are stored once."""
    weights = [each for each in state if isinstance(each, Tensor)]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // each.itemsize
        for each in weights
    }
    return min(sum(storages.values()), sum(each.numel() for each in weights))


def numbered(
    module: L.LightningModule, states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A checkpoint's optimizer states, with parameter numbers in place of names if it has names.

    The module must be attached to a Trainer and have its whole model.
    """
    if all("state" in each for each in states):
        return [dict(each) for each in states]
    optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for optimizer, state in zip(optimizers, states, strict=True):
        # Saved before the first step: its groups have options, but no state yet.
        stepped = any(name.startswith("state.") for name in state)
        groups = optimizer.param_groups  # torch takes the first parameter of each
        optimizer.param_groups = [each for each in groups if each["params"]]
        own = {} if stepped else get_optimizer_state_dict(module, optimizer, options=options)
        set_optimizer_state_dict(module, optimizer, own | dict(state), options=options)
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [next(loaded) if each["params"] else each for each in groups]
        if not stepped:
            optimizer.state.clear()
    return [each.state_dict() for each in optimizers]
