"""Checkpoints of a run: the half of WLBStrategy that saves them and resumes from them.

Lightning hands over what is the same on every rank (loops, callbacks, schedulers, the data module's
state), and leaves weights and optimizer state to the strategy, because no rank has all of them.

A save blocks training until it is on the disk, or, with ``async_save``, while the tensors are
copied (:mod:`lightning_wlb.checkpoints.async_saving`). What ends with the run does not wait for
threads: a save outside of training, one on an exception, and Slurm's before a requeue block.

What ModelCheckpoint removes goes when the save before it is on the disk. Where that fails it stays,
since it may be the last good checkpoint, until a later save of the same kind succeeds: weights
alone do not take the place of a checkpoint to resume from. Only checkpoints are removed.

A save that fails fails on all ranks. In the background each rank finds out at another moment: so it
tells the others in the exchange that ends a step (signals.py), and all act at the next step.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_wlb.arguments import choice, flag
from lightning_wlb.checkpoints import atomic_folders, sharded
from lightning_wlb.checkpoints.async_saving import COPIES, Background, Stager
from lightning_wlb.checkpoints.latest import (
    JOB,
    RESUMABLE,
    can_resume,
    older_requeues,
    requeue_number,
)
from lightning_wlb.checkpoints.writing import Parts, write
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.distributed.device_mesh import Size
from lightning_wlb.strategy import resuming
from lightning_wlb.strategy.checks import local_path
from lightning_wlb.strategy.launch import MeshStrategy
from lightning_wlb.supervision.signals import NOTICES, SAVE_FAILED
from lightning_wlb.supervision.watchdog import say
from lightning_wlb.training.tied_weights import Tie

END_SECONDS = 30.0
"""How long a run that ends by an exception waits for a save in the background."""


class CheckpointStrategy(MeshStrategy):
    """A mesh of processes that writes one checkpoint together, and reads it on any mesh.

    Args:
        sizes: as the three that follow, of :class:`.MeshStrategy`.
        virtual_stages: see there.
        process_group_backend: see there.
        timeout: see there.
        async_save: write checkpoints while training goes on.
        on_save_failure: ``"raise"`` or ``"warn"``.
        verify_checkpoints: compare what is read with its checksums.

    Raises:
        ValueError: for an argument that is none of these.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        virtual_stages: int,
        process_group_backend: str | None,
        timeout: timedelta | None,
        async_save: bool,
        on_save_failure: str,
        verify_checkpoints: bool,
    ) -> None:
        super().__init__(sizes, virtual_stages, process_group_backend, timeout)
        self._async_save = flag("async_save", async_save)
        self._on_save_failure = choice("on_save_failure", on_save_failure, ("raise", "warn"))
        self._verify = flag("verify_checkpoints", verify_checkpoints)
        self._ties: list[Tie] = []
        # Of the run that the launcher was handed: what it may resume from.
        self._candidates: list[Path] = []
        self._training = False
        self._jobs = Background()
        self._stager: Stager | None = None
        # What is to be removed when a save has succeeded; and of which kind, those to resume from
        # (True) and weights alone (False), the last save has failed.
        self._outdated: dict[Path, None] = {}
        self._failing: set[bool] = set()
        self._last_good: tuple[Path, float] | None = None

    # Set-up

    def _configure_launcher(self) -> None:
        self._launcher = None  # that of an earlier Trainer
        super()._configure_launcher()
        launcher = self._launcher or resuming.InPlace()
        launcher.launch = partial(self._launch, launcher.launch)  # type: ignore[method-assign]
        self._launcher = launcher

    def _launch(
        self, launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Note which checkpoint is asked for, before Lightning chooses one by itself."""
        trainer: pl.Trainer = kwargs.pop("trainer")
        call = inspect.signature(function).bind(*args, **kwargs)
        asked = call.arguments.get("ckpt_path")
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._candidates = resuming.candidates(trainer, asked, fitting)
        if self._candidates:
            call.arguments["ckpt_path"] = str(self._candidates[0])
        with nullcontext() if fitting else resuming.own_weights(trainer, call.arguments):
            return launch(function, *call.args, trainer=trainer, **call.kwargs)

    def setup_environment(self) -> None:
        """As :class:`.MeshStrategy` does; what saves in the background need comes on top.

        Raises:
            MisconfigurationException: if ranks do not see the same checkpoints.
        """
        super().setup_environment()
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, bool(self._candidates))
        if len(set(found)) > 1:
            raise MisconfigurationException(
                f"Ranks {[rank for rank, there in enumerate(found) if there]} see checkpoints to"
                " resume from, the other ranks see none. All ranks must see the same files: keep"
                " checkpoints on a file system that all nodes share."
            )
        if self._async_save and self._stager is None:
            self._stager = Stager(self.root_device)

    def check_checkpoint_folders(self, trainer: pl.Trainer) -> None:
        """Refuse, before the first step, folders of checkpoints that are in no file system.

        And one that a link would replace before it is known that what it leads to was saved.

        Raises:
            MisconfigurationException: naming the folder.
        """
        unsure = self._async_save or self._on_save_failure == "warn"
        for each in trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
                last = local_path(each.dirpath) / f"{each.CHECKPOINT_NAME_LAST}.ckpt"
                link = each.save_last == "link" and unsure
                if link and last.is_dir() and not last.is_symlink():
                    raise MisconfigurationException(
                        f"ModelCheckpoint(save_last='link') would delete {last}, which is no link,"
                        " before the next checkpoint is on the disk. Give it another name first."
                    )
        if isinstance(self.cluster_environment, SLURMEnvironment):
            local_path(trainer.default_root_dir)  # where the last one before a requeue goes

    # What Lightning saves and restores by itself

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the shards must exist before they can be filled."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: :meth:`load_checkpoint` restores optimizers too."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` collects the weights itself."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` collects optimizer state itself."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing left to do after :meth:`load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing left to do after :meth:`load_checkpoint`."""

    # Saving

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a sharded checkpoint folder; collective over all ranks.

        After an exception that not all ranks have together nothing is written, and that is said.
        """
        if not self.together:
            say(self.global_rank, f"{filepath} is not saved, since {self._faults.alone}")
            return
        if storage_options is not None:
            raise TypeError(
                "WLBStrategy.save_checkpoint does not take storage_options: it writes through"
                " torch.distributed.checkpoint, not through a CheckpointIO."
            )
        path = local_path(self.broadcast(filepath))
        weights_only = "optimizer_states" not in checkpoint
        checkpoint.pop("state_dict", None)
        checkpoint.pop("optimizer_states", None)
        if (job := os.environ.get("SLURM_JOB_ID")) is not None:
            checkpoint[JOB] = job
        background = (
            self._stager is not None
            and self._training
            and not self._interrupted
            and requeue_number(path) is None  # the requeue ends the job
        )
        self._end_saves(COPIES - 1 if background else 0)
        assert self.lightning_module is not None
        parts = sharded.collect(
            self.lightning_module,
            [] if weights_only else self.optimizers,
            checkpoint,
            self._renamed(),
        )
        if background:
            assert self._stager is not None
            copied = self._stager.stage(parts, self._jobs.holds_copies)
            self._jobs.submit(
                path, partial(self._write, path, copied, self._saving_group()), copies=1
            )
            return
        try:
            self._write(path, parts, None)
        except Exception as error:
            self._not_saved(path, error)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint once the save before it has succeeded."""
        if not self.is_global_zero or not self.together:
            return
        path = local_path(filepath)
        if self._jobs.busy:
            self._jobs.submit(path, partial(self._remove, path))
        else:
            self._remove(path)

    def check_saves(self) -> None:
        """At the beginning of a step: tell the others of a failed save, or act on what they told.

        Raises:
            Exception: what the save raised, on all ranks, unless ``on_save_failure="warn"``.
        """
        if NOTICES.seen & SAVE_FAILED:
            NOTICES.save_failed = False
            self._end_saves()
        elif self._jobs.failed:
            NOTICES.save_failed = True

    def on_train_start(self) -> None:
        """From here on saves may be written in the background."""
        super().on_train_start()
        self._training, NOTICES.save_failed = True, False

    def on_train_end(self) -> None:
        """Wait for saves in the background; every callback has made its last."""
        super().on_train_end()
        self._training = False
        self._end_saves()

    def on_exception(self, exception: BaseException) -> None:
        """Wait for saves in the background, not for long: other ranks may have died."""
        super().on_exception(exception)
        self._training = False
        self._end_saves(seconds=END_SECONDS)

    def finish_saves(self) -> None:
        """At the end of a run: wait for saves in the background, where nothing has."""
        self._training = False
        if not self._interrupted:
            self._end_saves()

    @property
    def _interrupted(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.interrupted

    def _saving_group(self) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        return saving_group(world, self._timeout)

    def _write(self, path: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
        """Write a checkpoint, and remove what it has made superfluous."""
        kind = RESUMABLE in parts.rest
        self._failing.add(kind)
        write(path, parts, group)
        self._failing.remove(kind)
        self._last_good = path, time.monotonic()
        if self.is_global_zero:
            self._outdated.pop(path, None)
            self._outdated.update(dict.fromkeys(older_requeues(path)))
            self._prune()

    def _remove(self, path: Path) -> None:
        self._outdated[path] = None
        self._prune()

    def _prune(self) -> None:
        for path in list(self._outdated):
            if can_resume(path) in self._failing:
                continue
            del self._outdated[path]
            try:
                atomic_folders.remove(path)
            except (OSError, ValueError) as error:
                rank_zero_warn(f"{path} could not be removed: {error} Training goes on.")

    def _end_saves(self, copies: int = 0, seconds: float | None = None) -> None:
        """Wait for saves in the background until at most so many copies are left; report."""
        for path, error in self._jobs.settle(copies, seconds):
            error.add_note(f"It was raised while {path} was saved in the background.")
            self._not_saved(path, error)

    def _not_saved(self, path: Path, error: BaseException) -> None:
        """Report a failed save on all ranks."""
        if self._on_save_failure == "raise" and not self._interrupted:
            raise error
        good = "There is no good checkpoint of this run yet."
        if self._last_good is not None:
            last, when = self._last_good
            minutes = (time.monotonic() - when) / 60
            good = f"The last good one, {last}, is {minutes:.1f} minutes old."
        rank_zero_warn(f"The checkpoint {path} was not saved: {error} {good}")

    # Loading

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a sharded checkpoint folder into model and optimizers; collective.

        Raises:
            Damaged: it is, and no other may take its place (:mod:`.resuming`).
        """
        self._end_saves()
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        # A validation after fit reads weights, and leaves the optimizers alone.
        fitting = trainer.state.fn == TrainerFn.FITTING
        asked, noted = local_path(checkpoint_path), self._candidates
        self._candidates = []
        candidates = Ranks().lead(
            # Lightning's tuner loads checkpoints of its own.
            lambda: noted if asked in noted[:1] else resuming.candidates_in(asked, fitting)
        )
        taken, rest = resuming.load_first(
            candidates,
            lambda path: sharded.load(
                path,
                module,
                self.optimizers if fitting else [],
                self._renamed(),
                weights_only,
                verify=self._verify,
            ),
        )
        # What Lightning says that it has restored, and ModelCheckpoint keeps.
        trainer._checkpoint_connector._ckpt_path = str(taken)
        return rest

    def _tied_copies(self) -> list[Tie]:
        """The ties whose head is here and whose embedding is on another stage."""
        return self._ties if self.rank.last_stage and not self.rank.first_stage else []

    def _renamed(self) -> dict[str, str]:
        """A tied head on a stage of its own goes by the embedding's name in checkpoints."""
        return {f"model.{tie.head}": f"model.{tie.embedding}" for tie in self._tied_copies()}


@cache
def saving_group(world: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group on the CPU for saves in the background; collective.

    Args:
        world: the default process group, after the end of which another one is made.
        timeout: how long an operation may wait; None: torch's default.
    """
    return dist.new_group(backend="gloo", timeout=timeout)
