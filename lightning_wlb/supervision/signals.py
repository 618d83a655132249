"""Signals that end a run: noted when they come, agreed on at a step's end, and obeyed by all ranks.

Lightning's handler runs collectives at once, while other ranks are elsewhere in the step. The run
then hangs until it is killed, with nothing saved. Here the handler only sets a flag, which goes
with the loss into the exchange that ends every step. Then all ranks, in the same place,

* on the requeue signal (SIGUSR1 unless ``SLURMEnvironment`` says otherwise; under Slurm with
  auto-requeue, while fitting) let Lightning save ``hpc_ckpt_N.ckpt`` in ``default_root_dir`` and
  requeue the job, and end the run. The requeued job resumes from there by itself. A signal that
  comes during a validation waits for the next training step;
* on SIGTERM end the run by Lightning's ``SIGTERMException`` (exit code 0 unless it is caught);
* on SIGINT (Ctrl-C) raise KeyboardInterrupt, which Lightning turns into its shutdown and exit code
  1. A second one ends this process at once.

Outside of fit the requeue signal is only reported; it must not end a process, so a handler is set
when the Trainer is made, and stays after the run. SIGTERM before the first step ends the process as
usual. After the last step, as in a save, it ends the process's next run at its first batch.

A rank that waits for its loader obeys a signal too: after ``LOADER_SECONDS`` the wait ends as if
there were no more data. Lightning has taken one batch ahead; the step of that batch is the last.

Cost: nothing; the exchange takes place anyway. A signal is obeyed after at most one step, and the
callbacks and the validation between two steps. So Slurm must send it early enough for a
validation, a step and a save (``--signal=SIGUSR1@300``).
"""

from __future__ import annotations

import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.data.loader_workers import WAIT, WaitEnded
from lightning_wlb.supervision.progress import AFTER, PROGRESS

REQUEUE, STOP, INTERRUPT, SAVE_FAILED = 1, 2, 4, 8
"""Bits of a notice: three signals, and that a save in the background has failed."""

LOADER_SECONDS = 5.0
"""How long a rank that has been signalled still waits for its loader."""


class Notices:
    """The notices of this process to all ranks at the end of a step, and those of any rank.

    Notices are bits: signals that came, a save that failed. They are sent in the exchange that ends
    every step (``Executor``), after which all ranks know them. To add a cause that ends a run, add
    a bit, set it in ``bits`` and obey it in ``_end_if_asked``.

    Attributes:
        mine: signals that this rank has to tell the others.
        save_failed: whether a save in the background has failed on this rank.
        seen: bits that all ranks know of.
        repeated: interrupts that this process has sent to itself, to end a wait.
    """

    def __init__(self) -> None:
        self.mine = self.seen = self.repeated = 0
        self.save_failed = False
        self._end_wait = False

    @property
    def bits(self) -> int:
        """All bits that this rank has to tell the others."""
        return self.mine | SAVE_FAILED * self.save_failed

    def obeyed(self) -> None:
        """Forget the notices on which all ranks now act; a later run begins without them."""
        self.mine = self.seen = 0

    def note(self, bit: int, number: int, _: FrameType | None = None) -> None:
        """Handle a signal, in the main thread, between any two instructions."""
        if self._end_wait:
            self._end_wait = False
            if WAIT.since is not None:
                self._leave_loader()
            return
        if bit == INTERRUPT and self.mine & INTERRUPT:
            raise KeyboardInterrupt
        before, self.mine = self.mine, self.mine | bit
        if not before:
            threading.Thread(target=self._look_after_loader, args=[number], daemon=True).start()

    def _leave_loader(self) -> None:
        if WAIT.holds_batch:
            raise WaitEnded
        if self.mine & INTERRUPT:
            raise KeyboardInterrupt
        if self.mine & STOP:
            raise SIGTERMException
        # The requeue signal: no step runs that could end with a save.

    def _look_after_loader(self, number: int) -> None:
        if self.mine & INTERRUPT:  # a handler must not print: it may have interrupted a print
            rank_zero_info("WLBStrategy: interrupted. This step is the last; Ctrl-C again ends it.")
        main, begin = threading.main_thread(), time.monotonic()
        while self.mine and main.is_alive():
            since = WAIT.since
            if since is not None and time.monotonic() - max(since, begin) > LOADER_SECONDS:
                self._end_wait = True
                self.repeated += number == signal.SIGINT
                assert main.ident is not None
                signal.pthread_kill(main.ident, number)  # it also ends a system call
            time.sleep(LOADER_SECONDS / 5)


NOTICES = Notices()
"""The notices of this process."""
_requeue, _interrupt = (partial(NOTICES.note, bit) for bit in (REQUEUE, INTERRUPT))


class Signals(_SignalConnector):
    """Sets handlers that only note signals; restores the user's own after the run."""

    def register_signal_handlers(self) -> None:
        """Called by the Trainer once the processes are set up."""
        self.received_sigterm = WAIT.ended = False
        self._original_handlers = self._get_current_signal_handlers()
        before = self._original_handlers[signal.SIGTERM]

        def stop(number: int, frame: Any) -> None:
            NOTICES.note(STOP, number)
            if callable(before):
                before(number, frame)

        self._register_signal(signal.SIGTERM, stop)
        # An ignored SIGINT (a shell's background job) and the user's own handler stay.
        if self._original_handlers[signal.SIGINT] is signal.default_int_handler:
            self._register_signal(signal.SIGINT, _interrupt)
        heed_requeue(self.trainer.strategy.cluster_environment)  # type: ignore[attr-defined]


def heed_requeue(environment: Any) -> None:
    """Note the requeue signal from now on, for good: without a handler it would end the process.

    As in Lightning, the user's own handler stays. A launcher may block the signal while the program
    imports its modules (examples/train.sbatch): a signal that came then is noted now.
    """
    number = _requeue_signal(environment)
    if number is not None and signal.getsignal(number) == signal.SIG_DFL:
        _SignalConnector._register_signal(number, _requeue)
    slurm = isinstance(environment, SLURMEnvironment)
    if slurm and threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number or signal.SIGUSR1])


def _requeue_signal(environment: Any) -> signal.Signals | None:
    """Under Slurm, the signal at which to requeue; None if the job is not to be requeued."""
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def _save_path(folder: str) -> str:
    """Where Lightning saves before the time limit: ``hpc_ckpt_N.ckpt``, with the next number."""
    names = [each.name for each in Path(folder).glob("hpc_ckpt_*.ckpt")]
    found = [re.fullmatch(r"hpc_ckpt_(\d{1,9})\.ckpt", name) for name in names]
    number = max((int(each[1]) for each in found if each), default=0) + 1
    return str(Path(folder) / f"hpc_ckpt_{number}.ckpt")


class EndOnSignal(pl.Callback):
    """Acts on the signals that ranks have agreed on; the last callback, added by WLBStrategy."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Let the epoch go on after a signal has ended the wait for the loader."""
        if WAIT.ended:
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Requeue, or end the run, as agreed; every other callback has seen the step."""
        PROGRESS.note(AFTER, "what comes after it")
        if NOTICES.seen & REQUEUE:
            # This comes before any validation that is due: there is not much time.
            rank_zero_info("WLBStrategy: the requeue signal has come. Saving, requeueing, ending.")
            NOTICES.obeyed()
            connector: Any = trainer._checkpoint_connector
            connector.hpc_save_path = _save_path  # Lightning's fails beside my_ckpt_tool.py
            requeue = trainer._signal_connector._slurm_sigusr_handler_fn
            requeue(_requeue_signal(trainer.strategy.cluster_environment), None)  # type: ignore
            raise SIGTERMException
        _end_if_asked(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """End all ranks at this batch; a requeue signal is reported, within fit obeyed later."""
        if trainer.state.fn != TrainerFn.FITTING and NOTICES.seen & REQUEUE:
            NOTICES.mine &= ~REQUEUE
            rank_zero_info(
                "WLBStrategy: the requeue signal has come. An evaluation has nothing to save: it"
                " goes on, and is not requeued."
            )
        _end_if_asked(trainer)

    on_test_batch_end = on_validation_batch_end


def _end_if_asked(trainer: pl.Trainer) -> None:
    seen = NOTICES.seen
    if not seen & (STOP | INTERRUPT):
        return
    NOTICES.obeyed()
    if seen & STOP:
        # At once: Lightning would look at the flag after a validation that is due.
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException
    raise KeyboardInterrupt


def heeds_interrupts() -> bool:
    """Whether Ctrl-C is noted here, and not handled by the user's or Lightning's handler."""
    return signal.getsignal(signal.SIGINT) is _interrupt
