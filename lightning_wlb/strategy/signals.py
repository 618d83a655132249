"""Signals that end a run: noted when they come, agreed on at a step's end, and obeyed by all ranks.

Lightning acts inside the handler: on Slurm's signal before the time limit it saves, on SIGTERM it
broadcasts. Both are collectives, and the other ranks are at another place of the step, so that the
run hangs until it is killed, with nothing saved. Here the handler only sets a flag, which travels
with the loss in the exchange that ends every step. Then all ranks, in the same place,

* on the requeue signal (SIGUSR1 unless ``SLURMEnvironment`` says otherwise; under Slurm with
  auto-requeue, while fitting) let Lightning save ``hpc_ckpt_N.ckpt`` in ``default_root_dir`` and
  requeue the job, and end the run. The requeued job resumes from there by itself. A signal that
  comes during a validation waits for the next training step;
* on SIGTERM end the run, as Lightning does between batches.

Outside of fit the requeue signal is only reported: an evaluation has nothing to save, and requeued
it would begin anew before the same limit. SIGTERM ends it.

The end is Lightning's ``SIGTERMException``: the process exits with code 0 unless it is caught.

Cost: nothing; the exchange takes place anyway. A signal is obeyed after at most one step and what
is between two, so Slurm must send it early enough for a validation, a step and a save
(``--signal=SIGUSR1@300``).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.strategy.executor import Executor

REQUEUE, STOP, SAVE_FAILED = 1, 2, 4
"""Bits of ``Executor.notice``; the last one, of saving.py, of ``Executor.save_notice``."""


class EndOnSignal(pl.Callback):
    """Takes the Trainer's handlers over from Lightning. ``WLBStrategy`` adds it."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen: Lightning has set its own handlers before. Listening again changes nothing."""
        _listen(trainer)

    on_sanity_check_start = on_validation_start = on_test_start = on_train_start

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Do what the ranks have agreed on; every other callback has seen the step.

        Raises:
            SIGTERMException: on every rank, when it has saved.
        """
        if _executor(trainer).noticed & REQUEUE:
            # This comes before any validation that is due: there is not much time.
            rank_zero_info("WLBStrategy: the requeue signal has come. Saving, requeueing, ending.")
            trainer._signal_connector._slurm_sigusr_handler_fn(_requeue_signal(trainer), None)  # type: ignore[arg-type]
            raise SIGTERMException
        _end_if_asked(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Let Lightning's loop end, on all ranks at this batch; report a requeue signal once.

        Within fit the next training step obeys that signal. A fit that follows in the same script
        does not know of it.
        """
        executor = _executor(trainer)
        if trainer.state.fn != TrainerFn.FITTING and executor.noticed & REQUEUE:
            executor.notice &= ~REQUEUE
            rank_zero_info(
                "WLBStrategy: the requeue signal has come. An evaluation has nothing to save: it"
                " goes on, and is not requeued."
            )
        _end_if_asked(trainer)

    on_test_batch_end = on_validation_batch_end


def _executor(trainer: pl.Trainer) -> Executor:
    executor: Executor = trainer.strategy.executor  # type: ignore[attr-defined]
    return executor


def _end_if_asked(trainer: pl.Trainer) -> None:
    if _executor(trainer).noticed & STOP:
        trainer._signal_connector.received_sigterm = True


def _requeue_signal(trainer: pl.Trainer) -> signal.Signals | None:
    """Under Slurm, the signal at which to requeue; None where it is not to."""
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def _listen(trainer: pl.Trainer) -> None:
    """Set handlers that note signals; Lightning restores the user's own at the run's end."""
    if threading.current_thread() is not threading.main_thread():
        return  # Lightning has set none there either
    originals = trainer._signal_connector._original_handlers
    executor = _executor(trainer)
    requeue = _requeue_signal(trainer)
    for number, bit in ((requeue, REQUEUE), (signal.SIGTERM, STOP)):
        if number is None:
            continue
        before = originals.get(number)
        if bit == REQUEUE and callable(before):
            continue  # as in Lightning, the user's own handler stands

        def note(signum: int, frame: FrameType | None, bit: int = bit, also: Any = before) -> None:
            executor.notice |= bit
            if callable(also):
                also(signum, frame)

        signal.signal(number, note)
