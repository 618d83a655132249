"""Saves a run's checkpoints and resumes from them; a member of WLBStrategy.

Lightning hands over what is the same on every rank (loops, callbacks, schedulers, the data module's
state), and leaves weights and optimizer state to the strategy, because no rank has all of them.

A save blocks training until it is on the disk, or, with ``async_save``, while the tensors are
copied (:mod:`lightning_wlb.checkpoints.async_saving`). A save after which the process may end
always blocks: outside of training, on an exception, and before Slurm requeues the job.

A failed save fails on all ranks and ends the run. Ranks notice the failure of a background save at
different times: each reports it in the exchange that ends a step, and all raise in the next step.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero, rank_zero_warn
from torch.optim import Optimizer

from lightning_wlb.argument_checks import flag
from lightning_wlb.checkpoints import atomic_folders, sharded
from lightning_wlb.checkpoints.async_saving import COPIES, BackgroundSaves, FilesAfterSaves, Stager
from lightning_wlb.checkpoints.save_order import SavingRun
from lightning_wlb.checkpoints.writing import CheckpointContent, write
from lightning_wlb.data.trainer_guards import called_by, count_as_unbroken
from lightning_wlb.distributed.collective_errors import Ranks, names_of_ranks
from lightning_wlb.distributed.process_groups import saving_group
from lightning_wlb.file_checks import check_links
from lightning_wlb.strategy import resuming
from lightning_wlb.strategy.checks import local_path
from lightning_wlb.supervision.progress import OPTIMISING, PROGRESS
from lightning_wlb.supervision.signals import NOTICES, SAVE_FAILED

END_SECONDS = 30.0
"""How long a run that ends by an exception waits for a save in the background."""


def _is_so(record: logging.LogRecord) -> bool:
    """Whether a log line is true: on an exception Lightning logs "saved" even if nothing was."""
    _, says, path = record.getMessage().rpartition(", saved checkpoint to ")
    return not says or "://" in path or Path(path).exists()


class Checkpointer:
    """Writes one checkpoint of all ranks together, and reads it on any mesh."""

    def __init__(self, *, async_save: bool) -> None:
        self.async_save = flag("async_save", async_save)
        rank_zero.rank_zero_module.log.addFilter(_is_so)
        # The checkpoints that the current run may resume from.
        self._candidates: list[Path] = []
        self._named: Any = None  # the run's ckpt_path
        self._start: str | None = None  # the checkpoint that the run resumes from, if any
        self._begun, self._resumes, self._restored = True, False, True
        self._thread: int | None = None  # the thread that trains now
        self._handled = id(None)  # the exception that the script handled as it started this run
        self._jobs = BackgroundSaves()
        self._keepers: list[ModelCheckpoint] = []  # those whose file system and links are ours
        self._stager: Stager | None = None
        self._save_failed = False  # whether the last save failed
        self._last_good: tuple[Path, float] | None = None
        self._run = SavingRun()

    # Before a run

    def noting(self, launcher: _Launcher) -> _Launcher:
        """Return the launcher, which from now on notes what each run is asked to resume from."""
        launcher.launch = partial(self._launch, launcher.launch)  # type: ignore[method-assign]
        return launcher

    def _launch(
        self, launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        trainer: pl.Trainer = kwargs.pop("trainer")
        self._begun, self._handled = False, id(sys.exc_info()[1])
        call = inspect.signature(function).bind(*args, **kwargs)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._candidates = resuming.candidates(trainer, call.arguments.get("ckpt_path"), fitting)
        if self._candidates:
            call.arguments["ckpt_path"] = str(self._candidates[0])
        connector = trainer._checkpoint_connector  # its path may be the one that it read last
        own = connector._ckpt_path if connector._user_managed else None
        self._named = start = call.arguments.get("ckpt_path") or own
        if fitting and start in (None, "last") and not connector._user_managed:
            start = connector._parse_ckpt_path(TrainerFn.FITTING, start, True, True)
        self._start = None if start in (None, "last") else str(start)
        self._restored = self._start is None or not fitting
        with nullcontext() if fitting else resuming.own_weights(trainer, call.arguments):
            return launch(function, *call.args, trainer=trainer, **call.kwargs)

    def compare_start(self) -> None:
        """Refuse a checkpoint that only some ranks would resume from; collective."""
        starts = Ranks().every(lambda: self._start)
        blind = [rank for rank, each in enumerate(starts) if each is None]
        if blind and (path := next(filter(None, starts), None)) is not None:
            raise MisconfigurationException(
                f"This run would go on from {path}, which {names_of_ranks(blind)} cannot see, or"
                " was not given. Give all ranks the same ckpt_path, and as default_root_dir or"
                " dirpath a folder on a file system that all nodes share."
            )

    def check_folders(self, trainer: pl.Trainer, environment: object) -> None:
        """Refuse, before the first step, checkpoint folders that not all ranks see; collective.

        Before a fit missing folders are made.
        """
        saving: bool = not trainer.fast_dev_run  # type: ignore[attr-defined]
        saving = saving and trainer.state.fn == TrainerFn.FITTING
        for each in trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
                folder = local_path(each.dirpath)  # refuses a remote one, also to evaluate
                if saving:
                    atomic_folders.make_shared(folder, Ranks())
        if isinstance(environment, SLURMEnvironment):
            folder = local_path(trainer.default_root_dir)  # for the save before a requeue
            if saving:
                check_links(folder)

    # Saving

    def refuse_half_steps(self) -> None:
        """Refuse a save by a signal's handler inside an optimizer's step, or by another thread."""
        own = self._thread
        if own is not None and (threading.get_ident() != own or PROGRESS.part == OPTIMISING):
            raise MisconfigurationException(
                "A checkpoint that another thread asks for, or a signal's handler in the middle of"
                " an optimizer's step, could hold half of a step: it is not saved. Let them set a"
                " flag, and save in a callback's on_train_batch_end."
            )

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        renamed: Mapping[str, str],
    ) -> None:
        """Write a sharded checkpoint folder; collective over all ranks.

        ``checkpoint`` is what Lightning saves, the same on all ranks; ``renamed`` maps names of
        parameters in the module to their names in checkpoints, where these differ.
        """
        if not (self._restored or path.name.startswith(resuming.SEARCH)):
            raise MisconfigurationException(
                f"{path} was asked for before the run has the state of {self._start} again, from"
                " which it resumes. It is not saved: it would hold initial values, and the next"
                " attempt would take it for the newest. Save in on_train_start, not on_fit_start."
            )
        weights_only = "optimizer_states" not in checkpoint
        if not optimizers or "evaluated" in checkpoint:
            # Outside of a fit a save has nothing to resume from: "last" passes it over.
            checkpoint.pop(resuming.RESUMABLE, None)
            weights_only = True
        # The strategy leaves these empty, so a hook has added whatever they hold.
        if checkpoint.pop("state_dict", None) or any(checkpoint.pop("optimizer_states", ())):
            raise MisconfigurationException(
                "A hook (on_save_checkpoint) has put values into checkpoint['state_dict'] or"
                " ['optimizer_states'], whose place the shards of the model and the optimizers take"
                " under WLBStrategy: they would be lost. Keep averages of weights and the like"
                " under a key of their own, as checkpoint['ema']."
            )
        if (job := os.environ.get("SLURM_JOB_ID")) is not None:
            checkpoint[resuming.JOB] = job
        interrupted = module.trainer.interrupted
        # A requeue ends the job, and with it the threads.
        wait = self._thread is None or interrupted or resuming.requeue_number(path) is not None
        if self.async_save and self._stager is None:
            self._stager = Stager(module.device)
        stager = None if wait else self._stager
        self.settle(COPIES - 1 if stager else 0, interrupted=interrupted)
        parts = sharded.collect(module, [] if weights_only else optimizers, checkpoint, renamed)
        if stager is not None:
            copied = stager.stage(parts, self._jobs.holds_copies)
            save = partial(self.write, path, copied, saving_group())
            self._jobs.submit(path, save, copies=1, leaves=path)
            return
        try:
            self.write(path, parts)
        except Exception as error:
            self._not_saved(path, error, interrupted)

    def remove(self, filepath: str | Path, target: Path | None = None) -> None:
        """Remove a checkpoint once the save before it has succeeded, else never; for rank 0.

        A link to ``target``, if that exists then, takes its place. Before training only a search's
        is removed: OnExceptionCheckpoint would remove the one that the next fit is to resume from.
        """
        path = local_path(filepath)
        if not (self._begun or path.name.startswith(resuming.SEARCH)):
            return
        if self._jobs.busy:
            self._jobs.submit(path, partial(self._remove, path, target), leaves=target)
        else:
            self._remove(path, target)

    def _link(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        """Replace ModelCheckpoint's method, which would link to a checkpoint not yet written."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self.remove(linkpath, local_path(filepath))

    def check(self, trainer: pl.Trainer) -> None:
        """Begin a step: tell others of a failed save, or raise its error once all know of it."""
        if self._resumes and trainer.training:
            self._resumes = False
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        if NOTICES.seen & SAVE_FAILED:
            NOTICES.save_failed = False
            self.settle()
        elif self._jobs.failed:
            NOTICES.save_failed = True

    @property
    def run_failed(self) -> bool:
        """Whether an exception of this run is being handled; an earlier one does not count."""
        return id(sys.exc_info()[1]) not in (id(None), self._handled)

    @property
    def refusal(self) -> str | None:
        """Why a save is refused: initial values would be the newest checkpoint. None: it is not."""
        return None if self._begun or not self.run_failed else "training had not begun"

    def train_begins(self, trainer: pl.Trainer) -> None:
        """From here on saves may be written in the background."""
        self._resumes = count_as_unbroken(trainer)
        self._begun = self._begun or not called_by("_lr_find")
        self._thread, NOTICES.save_failed = threading.get_ident(), False
        for each in trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint):
                each._fs = FilesAfterSaves(each._fs, self._jobs)
                each._link_checkpoint = self._link  # type: ignore[method-assign]
                self._keepers.append(each)

    def train_ends(self, seconds: float | None = None, *, interrupted: bool = False) -> None:
        """Wait for saves in the background, at most ``seconds``; None: as long as they take."""
        self._thread = None
        while self._keepers:
            each = self._keepers.pop()
            each._fs = each._fs.files
            del each._link_checkpoint
        self.settle(seconds=seconds, interrupted=interrupted)

    def settle(
        self, copies: int = 0, seconds: float | None = None, *, interrupted: bool = False
    ) -> None:
        """Wait until at most ``copies`` saves in the background still hold copies.

        The error of a failed save is raised; if the run is interrupted, a warning has it.
        """
        for path, error in self._jobs.settle(copies, seconds):
            error.add_note(f"It was raised while {path} was saved in the background.")
            self._not_saved(path, error, interrupted)

    def write(
        self, path: Path, parts: CheckpointContent, group: dist.ProcessGroup | None = None
    ) -> None:
        """Write a checkpoint now, and remove the older requeue checkpoints that it replaces."""
        self._save_failed = True
        write(path, parts, group, self._run)
        self._save_failed = False
        self._last_good = path, time.monotonic()
        if Ranks(group).leads:
            for each in resuming.older_requeues(path):
                self._remove(each)

    def _remove(self, path: Path, target: Path | None = None) -> None:
        if self._save_failed or (target is not None and not target.exists()):
            return
        try:
            atomic_folders.remove(path)
            if target is not None:
                path.symlink_to(os.path.relpath(target, path.parent))
        except (OSError, ValueError) as error:
            rank_zero_warn(f"{path} could not be removed: {error} Training goes on.")

    def _not_saved(self, path: Path, error: BaseException, interrupted: bool) -> None:
        """Raise the error of a failed save; only warn where an exception ends the run anyway."""
        if not interrupted:
            raise error
        good = "There is no good checkpoint of this run yet."
        if self._last_good is not None:
            last, when = self._last_good
            minutes = (time.monotonic() - when) / 60
            good = f"The last good one, {last}, is {minutes:.1f} minutes old."
        rank_zero_warn(f"The checkpoint {path} was not saved: {error} {good}")

    # Loading

    def load(
        self,
        path: Path,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        renamed: Mapping[str, str],
    ) -> dict[str, Any]:
        """Read a checkpoint, or the newest in a folder, into model and optimizers; collective.

        ``renamed`` is as in :meth:`save`. Raises Damaged if no undamaged one may be taken.
        """
        self.settle()
        trainer = module.trainer
        # A validation after fit reads weights, and leaves the optimizers alone.
        fitting = trainer.state.fn == TrainerFn.FITTING

        def choose() -> list[Path]:
            if path in self._candidates[:1]:
                return self._candidates
            if path != Path(self._named or "").expanduser():
                # Lightning or its tuner has chosen this path, and no user has named it.
                resuming.refuse_strangers(path)
            return resuming.candidates_in(path, fitting)

        candidates = Ranks().lead(choose)
        taken, rest = resuming.load_first(
            candidates,
            lambda path: sharded.load(path, module, optimizers if fitting else [], renamed),
        )
        if fitting and any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
            rank_zero_warn(
                "The learning rate may differ from an unbroken run's: Lightning leaves out the step"
                " of ReduceLROnPlateau after the save and, by epochs, at the end of the epoch."
            )
        self._restored = self._restored or not taken.name.startswith(resuming.SEARCH)
        self._run.knows(taken)
        resuming.check_counts(rest, taken, trainer)
        resuming.forget_others(rest, taken, trainer)
        # Lightning logs this path as restored, and ModelCheckpoint does not remove it.
        trainer._checkpoint_connector._ckpt_path = str(taken)
        return rest
