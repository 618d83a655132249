"""Refusals of what WLBStrategy cannot run, before anything is launched or split."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from torch.optim import LBFGS, Adafactor, Rprop

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule


def data_module_of(trainer: pl.Trainer) -> WLBDataModule | None:
    """The Trainer's data module, if it is one that plans steps."""
    data = getattr(trainer, "datamodule", None)  # Lightning sets it where there is one.
    return data if isinstance(data, WLBDataModule) else None


def checked_module(module: pl.LightningModule | None) -> LanguageModule:
    """The module; raises MisconfigurationException if no step plan can run with its settings."""
    if not isinstance(module, LanguageModule):
        raise MisconfigurationException(
            f"WLBStrategy runs lightning_wlb.LanguageModule and its subclasses, but got"
            f" {type(module).__name__}. Derive your module from LanguageModule and build your"
            " own model in build_model: a module with embed, layers and head."
        )
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets automatic_optimization=False. WLBStrategy runs the"
            " forwards and backwards of a step, in the order of the plan, so manual optimization"
            " cannot work. Remove it and return the loss of self.step(batch) from training_step."
        )
    return module


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise MisconfigurationException for options and callbacks that a step plan cannot follow."""
    interval = getattr(trainer, "_val_check_time_interval", None)
    if interval is not None and trainer.world_size > 1:
        raise MisconfigurationException(
            f"Trainer(val_check_interval) of {interval:g} seconds goes by the clock of each rank,"
            " and ranks that do not validate after the same step wait for each other for ever."
            " Give a number of steps."
        )
    saves = type(trainer.strategy.checkpoint_io)
    if saves is not TorchCheckpointIO:
        raise MisconfigurationException(
            f"WLBStrategy would not save by {saves.__name__}: all ranks write a checkpoint"
            " together, through torch.distributed.checkpoint. Remove it from Trainer(plugins=...);"
            " WLBStrategy(async_save=True) saves while training goes on."
        )
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(each).__name__
        if isinstance(each, BatchSizeFinder):
            raise MisconfigurationException(
                f"{name} looks for a batch size, but the size of a step is that of its documents."
                " Remove it; lightning-wlb plan says how many tokens (cap) fit in memory."
            )
        elif isinstance(each, ModelPruning):
            raise MisconfigurationException(
                f"{name} compares weights of one process, but here they are sharded over"
                " ranks. Remove it, and prune the model after training: lightning-wlb export."
            )
        elif isinstance(each, StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"{name} copies the whole model before it is split, so that it would average"
                " nothing that is trained, or fail. Remove it; keep several checkpoints"
                " (ModelCheckpoint(save_top_k=...)), and average their weights after the run."
            )
        elif isinstance(each, ModelCheckpoint | OnExceptionCheckpoint):
            given, inserts = str(each.filename), getattr(each, "auto_insert_metric_name", True)
            if "/" in (given if inserts else re.sub("{.*?}", "", given)):
                raise MisconfigurationException(
                    f"{name}(filename={given!r}) would save into subfolders, where no resumed run"
                    " looks. Take the / out; a metric named with one, as in 'loss={val/loss:.3f}',"
                    " needs auto_insert_metric_name=False."
                )


def checked_model(module: LanguageModule) -> Decoder:
    """The module's model; raises MisconfigurationException if it cannot be split."""
    model = module.model
    missing = [name for name in ("embed", "layers", "head") if getattr(model, name, None) is None]
    if not isinstance(model, Decoder) or missing:
        without = f" without {', '.join(missing)}" if missing else ", which is no Decoder"
        raise MisconfigurationException(
            f"{type(module).__name__}.build_model must return a whole lightning_wlb.Decoder, with"
            f" embed, layers and head, but the model is {type(model).__name__}{without}. Derive"
            " your model from it; lightning_wlb.Transformer is one."
        )
    outside = [name for name, _ in module.named_parameters() if not name.startswith("model.")]
    if outside:
        raise MisconfigurationException(
            f"Parameters outside of self.model are not parallelised: {', '.join(outside)}."
            " Move them into the model's embed, layers or head."
        )
    return model


def make_optimizers(module: LanguageModule, make: Callable[[], None]) -> None:
    """Make each rank's optimizers; the stages of some ranks may be frozen; collective.

    Raises:
        MisconfigurationException: all stages are frozen; the optimizer of a frozen stage has no
            group of parameters, which torch refuses; or an optimizer needs whole tensors.
    """
    trained, refused = any(each.requires_grad for each in module.parameters()), None
    try:
        make()
    except ValueError as error:
        if trained or "empty parameter list" not in str(error):
            raise
        refused = error
    everyone = Ranks().every(lambda: (trained, refused is not None))
    empty = [rank for rank, (_, refused) in enumerate(everyone) if refused]
    if empty or not any(trained for trained, _ in everyone):
        where = f"the pipeline stages on ranks {empty[:8]}" if empty else type(module).__name__
        raise MisconfigurationException(
            f"All parameters of {where} are frozen. Leave requires_grad of some as it is, or, if"
            " other stages train, let configure_optimizers give this one's optimizer a group, which"
            " may be empty: AdamW([{'params': [...]}])."
        ) from refused
    if unfit := [e for e in module.trainer.optimizers if isinstance(e, LBFGS | Adafactor | Rprop)]:
        raise MisconfigurationException(
            f"{type(unfit[0]).__name__} needs whole parameters and gradients on every rank, and"
            " WLBStrategy shards them. Use AdamW or another optimizer that goes by elements."
        )


def check_process_group(backend: Any, timeout: Any) -> None:
    """Raise MisconfigurationException for a timeout or backend that torch does not take.

    ``backend`` is one of torch's names, or several as in ``"cpu:gloo,cuda:nccl"``.
    """
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    parts = backend.split(",") if isinstance(backend, str) else [str(backend)]
    if backend is not None and any(part.rpartition(":")[2].lower() not in known for part in parts):
        raise MisconfigurationException(
            f"process_group_backend={backend!r} is not known. Give one of {', '.join(known)}, or"
            " None for the device's own."
        )
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise MisconfigurationException(
            f"timeout={timeout!r} is no time. Give a datetime.timedelta, as in"
            " timedelta(minutes=10), or None for ten minutes."
        )


def check_precision(plugin: Precision) -> None:
    """Raise MisconfigurationException for a user's own plugin: only its name would be used."""
    if not type(plugin).__module__.startswith("lightning."):
        raise MisconfigurationException(
            f"WLBStrategy would not run the precision plugin {type(plugin).__name__}: parameters"
            " are cast where gathered, and there is no autocast. Use Trainer(precision=...)."
        )


def check_reduce_dtype(asked: str | None, computed: torch.dtype, precision: str) -> None:
    """Raise MisconfigurationException if sums are narrower than the dtype of computation."""
    if asked is not None and getattr(torch, asked).itemsize < computed.itemsize:
        raise MisconfigurationException(
            f"reduce_dtype={asked!r} would round what precision={precision!r} computes. Leave it"
            " out, or give a precision that computes in bfloat16."
        )


def check_script(processes: int) -> None:
    """Refuse to start further ranks where there is no script that they could run.

    Lightning's launcher runs the command of this process again, once for each further rank.

    Raises:
        MisconfigurationException: in a notebook or another interactive session, with ``python -c``,
            or if the program came by standard input.
    """
    if _IS_INTERACTIVE:
        where = "in an interactive session, as a notebook is"
    elif sys.argv[0] in ("-c", "-", ""):
        where = "by python -c or from standard input"
    else:
        return
    raise MisconfigurationException(
        f"WLBStrategy starts a process for each of the {processes} devices of a node by running"
        f" the script again, but this program runs {where}, and there is no script. Write it into a"
        " file and run that (python train.py, or torchrun), or use devices=1 here."
    )


def check_tasks() -> None:
    """Refuse several tasks of Slurm that would each start ranks of their own.

    Lightning ignores Slurm in a job with a name that salloc and srun give to interactive jobs. The
    tasks would then wait for each other, or all be rank 0.

    Raises:
        MisconfigurationException: no NODE_RANK, which marks processes that the user starts himself.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "NODE_RANK" not in os.environ:
        raise MisconfigurationException(
            f"Slurm runs this program in {tasks} tasks, but Lightning ignores Slurm in a job that"
            f" is called {os.environ.get('SLURM_JOB_NAME')!r}, so that each task would start ranks"
            " of its own. Name the step: srun --job-name=train ..."
        )


def local_path(path: str | Path) -> Path:
    """A checkpoint's path, ``~`` expanded; raises MisconfigurationException if it is remote."""
    if "://" in str(path):
        raise MisconfigurationException(
            f"WLBStrategy reads and writes checkpoints in a file system, but got {path}. Mount"
            " the storage and pass its path; every rank must see the same files."
        )
    return Path(path).expanduser()


def refuse_storage_options(given: Any) -> None:
    """Raise TypeError for options that only a CheckpointIO could follow."""
    if given is not None:
        raise TypeError(
            "WLBStrategy.save_checkpoint does not take storage_options: it writes through"
            " torch.distributed.checkpoint, not through a CheckpointIO."
        )
