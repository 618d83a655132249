"""Guards against a Trainer that repeats, loses or miscounts steps: refusals, and kept hooks.

Lightning's own hooks do nothing, so most users override them without calling ``super()``. A few
hooks of this package save what a run resumes from; without them a run would repeat documents or
restart its learning rate. If a class calls :func:`keep_hooks` whenever it is subclassed, its hooks
run before an override. If the override calls ``super()`` too, they run twice, and must allow that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_wlb.data.batch import StepBatch


def keep_hooks(root: type, cls: type, names: tuple[str, ...]) -> None:
    """Let the hooks that ``cls`` overrides run before its overrides.

    Args:
        root: the class whose hooks are kept, and those of its subclasses.
        cls: a subclass that was just made.
        names: names of the hooks.
    """
    hidden = next(each for each in cls.__mro__[1:] if issubclass(each, root))
    for name in names:
        own, theirs = getattr(cls, name), getattr(hidden, name)
        if own is not theirs:  # the override may also be a mixin's
            setattr(cls, name, _behind(theirs, own))


def _behind(theirs: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def hook(*args: Any, **kwargs: Any) -> Any:
        kept = theirs(*args, **kwargs)
        given = own(*args, **kwargs)
        return {**kept, **given} if isinstance(kept, dict) and isinstance(given, dict) else given

    return hook


def called_by(name: str) -> bool:
    """Whether a function of Lightning with this name is running."""
    return _running(name) is not None


def saving_trainer() -> L.Trainer | None:
    """The Trainer that is making a checkpoint, if any."""
    frame = _running("dump_checkpoint")
    return None if frame is None else frame.f_locals["self"].trainer


def _running(name: str) -> FrameType | None:
    frames = (each for each, _ in walk_stack(sys._getframe()) if each.f_code.co_name == name)
    ours = (each for each in frames if each.f_globals["__name__"].startswith("lightning.pytorch."))
    return next(ours, None)


def refuse_other_loaders(in_worker: bool = False, noted: bool = False) -> None:
    """Raise MisconfigurationException in a worker, or where batches that are read are not noted.

    Lightning does not tell a loader to which Trainer it was given. But if a Trainer trains on it,
    one of Lightning's fetchers is on the stack, called by the training loop. (In a user's own loop
    within a hook, no fetcher is nearer than that loop.) A worker of another loader begins every
    epoch at the run's beginning. Accelerate's own loader requests one batch ahead. ``noted``: the
    loader is a WLBDataModule's, whose hook notes the batches if Lightning calls it.
    """
    if in_worker:
        raise MisconfigurationException(
            "The workers of a torch or torchdata loader would read every epoch of a StepDataset"
            " from the beginning. Take lightning_wlb.StepLoader(dataset, num_workers=...), or give"
            " a Trainer a WLBDataModule."
        )
    loops: dict[str, Any] = {}
    for frame, _ in walk_stack(sys._getframe()):
        name = frame.f_globals.get("__name__", "")
        if name == "accelerate.data_loader":
            raise MisconfigurationException(
                "A loader of steps was given to accelerator.prepare, which takes a batch ahead, so"
                " that a resumed run would skip a step. Iterate over the StepLoader itself: its"
                " batches are the rank's own already."
            )
        home, _, loop = name.partition(".loops.")
        if home in ("lightning.pytorch", "pytorch_lightning"):
            loops.setdefault(loop, frame.f_locals.get("self"))
    first, asking = [*loops, "", ""][:2]
    if first != "fetchers" or asking not in ("fit_loop", "training_epoch_loop"):
        return
    hook = "on_after_batch_transfer"
    selected = loops[asking].trainer._data_connector._datahook_selector.get_instance(hook)
    if not (noted and is_overridden(hook, selected)):
        raise MisconfigurationException(
            "The Trainer was given a loader of steps, and does not note which it has trained on: it"
            " would repeat or skip steps in later epochs or when resumed. Give the Trainer the"
            " WLBDataModule: trainer.fit(model, WLBDataModule(documents, context_window=...,"
            " micro_batches=...)). A loader of your own is for a loop without a Trainer."
        )


def refuse_other_namespace(what: str) -> NoReturn:
    """Raise MisconfigurationException for a Trainer of another package."""
    raise MisconfigurationException(
        f"{what} A Trainer of `pytorch_lightning` belongs to another package than `lightning` and"
        " does not know it. Write `import lightning.pytorch as L` and use L.Trainer,"
        " L.LightningModule and L.LightningDataModule throughout."
    )


def refuse_without_position(batch: Any) -> None:
    """Raise MisconfigurationException unless it is a step batch, which a subclass may wrap."""
    if not isinstance(batch, StepBatch):
        raise MisconfigurationException(
            f"A batch to train on came as a {type(batch).__name__}: the position in the documents"
            " would not move, and every epoch and resumed run repeat them. Let train_dataloader"
            " return WLBDataModule's loader as it is, and on_before_batch_transfer its StepBatch."
        )


def refuse_accumulation(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException if an optimizer step would take several batches, ever."""
    number = trainer.accumulate_grad_batches
    asked = [f"accumulate_grad_batches={number}"] if number != 1 else []
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, GradientAccumulationScheduler):
            several = each.going_to_accumulate_grad_batches()
            asked += [f"{type(each).__name__}({each.scheduling})"] if several else []
    if asked:
        raise MisconfigurationException(
            f"{' and '.join(asked)} would accumulate gradients of several batches, but a batch"
            " already holds all micro-batches of an optimizer step. Remove it, and make steps"
            " larger by WLBDataModule(micro_batches=...)."
        )


def refuse_repeats(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException for a fit that would repeat batches."""
    times: float = trainer.overfit_batches  # type: ignore[attr-defined]
    if times > 0:
        raise MisconfigurationException(
            f"Trainer(overfit_batches={times}) would repeat batches of a loader, but each step is"
            " planned from the documents that come next. To overfit, give WLBDataModule a few"
            " documents; to stop epochs early, use limit_train_batches."
        )


def fitting_trainer() -> L.Trainer | None:
    """The Trainer whose fit has called this, if any."""
    frame = _running("_fit_impl")
    return None if frame is None else frame.f_locals["self"]


def refuse_part(module: L.LightningModule, trainer: L.Trainer | None) -> None:
    """Raise MisconfigurationException for a schedule by tokens of a module within another one."""
    if trainer is not None and trainer.lightning_module is not module:
        raise MisconfigurationException(
            f"{type(module).__name__} is a part of another module, so no checkpoint has its"
            " tokens_seen, by which warmup_tokens and decay_tokens count. Derive the outer module"
            " from it, or leave these two out and make a schedule by tokens that you save."
        )


def refuse_two_runs(before: L.Trainer | None, trainer: L.Trainer | None, run: object) -> None:
    """Raise MisconfigurationException where a (data) module would change Trainers during a fit."""
    if before in (None, trainer):
        return
    if run not in (before.lightning_module, getattr(before, "datamodule", None)):
        return
    fits = (before.state.fn, before.state.status) == (TrainerFn.FITTING, TrainerStatus.RUNNING)
    ending = _running("on_run_end")  # it calls on_train_end, after the last batch
    if fits and (ending is None or ending.f_locals["self"] is not before.fit_loop):
        raise MisconfigurationException(
            f"A Trainer was given the {type(run).__name__} of another one whose fit goes on, and"
            " would take its position and counts. Give it a WLBDataModule of its own and a copy"
            " of the model, or evaluate in on_train_end or after the fit."
        )


def leave_open_epoch(checkpoint: dict[str, Any]) -> None:
    """Record, in place, that an epoch cut short by ``max_steps``, a Timer or an exception goes on.

    Otherwise a resumed run would count the rest of it as another epoch, and end too soon.
    """
    if "loops" not in checkpoint:
        return
    progress = checkpoint["loops"]["fit_loop"]
    batches, epochs = progress["epoch_loop.batch_progress"], progress["epoch_progress"]
    trainer: Any = saving_trainer()
    fetcher = trainer and trainer.fit_loop._data_fetcher
    current = epochs["current"]  # ready > started: no epoch is open, the next one begins
    # Lightning takes a batch for the epoch's last before it is moved to the device and begun. A
    # resumed run that has nothing left to train reads a batch, too: of an epoch that is not open.
    is_open = current["processed"] < current["started"]
    if fetcher and is_open and fetcher.fetched > batches["current"]["ready"]:
        batches["is_last_batch"] = False
    inside = batches["current"]["ready"] or current["ready"] == current["started"] > 0
    if inside and not batches["is_last_batch"] and current["processed"] == current["started"]:
        for each in epochs.values():
            each["processed"] = each["completed"] = each["started"] - 1


def count_as_unbroken(trainer: L.Trainer) -> bool:
    """Let a resumed run count steps and epochs as an unbroken run does; call it before training.

    Lightning resumes a run that was saved at an epoch's last step inside that epoch: the run
    validates, and ends the next epoch, by the old number of batches, and trains one more epoch if
    it is resumed again. With ``max_steps`` the epoch counts twice, and the run ends an epoch too
    soon. An epoch at whose beginning a run was saved counts as ready twice. A step that failed
    before the save counts, too. Returns whether the run resumes: then WLBStrategy's first step sets
    the loggers' step count, to which Lightning may add one, depending on the save.
    """
    loop: Any = trainer.fit_loop
    steps, epochs = loop.epoch_loop, loop.epoch_progress
    if not loop.is_resuming:
        return False
    total = steps.batch_progress.total
    total.ready = total.started = total.processed
    over = epochs.current.processed == epochs.current.started
    if loop.restarted_mid_epoch and steps.restarted_on_last:
        # Saved in a validation. If none was due (a stop caused it), Lightning would train on.
        over = not steps._should_check_val_fx(loop._data_fetcher)
    if over and steps.batch_progress.is_last_batch:
        for count in (epochs.total, epochs.current):
            count.ready = count.completed = count.processed = count.started
        steps.reset()  # counts the step that was saved
        steps.batch_progress.is_last_batch = True  # no epoch is open: the run may end before one is
        loop.reset_restart_stage()
        steps.reset_restart_stage()
        # Not by the outer loop's setter, which always sets True under max_steps.
        loop._restarting = steps.restarting = False
    return True


def refuse_half_states(
    trainer: L.Trainer, steps: int, begun: bool, anew: bool, planned: bool
) -> None:
    """Refuse to save a state in the middle of a step, or one that is only partly restored.

    If an exception requested the save, that exception is raised again after the run's teardown.

    Args:
        steps: optimizer steps of the last batch so far; within the batch more may follow.
        begun: whether the run has begun a batch.
        anew: whether optimizers were made since the last batch, and not restored.
        planned: whether the strategy runs step plans; it then makes the other checks itself.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    # Only in Lightning's handling of the exception, not in a user's handler.
    failed = sys.exc_info()[1] if called_by("_interrupt") else None
    if batches.started > batches.processed and steps > 0:
        reason = (
            f"A checkpoint was asked for inside a batch, when optimizers had taken {steps} of its"
            " steps (manual optimisation): nothing is saved. Save in on_train_batch_end."
        )
    elif anew and failed is None and not called_by("_lr_find"):
        reason = (
            f"After {trainer.global_step} steps a fit has begun with new optimizers, as does"
            " Tuner.lr_find, and has trained no batch: nothing is saved, since a resumed run would"
            " lack the state of the old optimizers. Save before that, or give fit a ckpt_path."
        )
    elif planned:
        return
    elif failed is not None and _has_broken_step_off(trainer, failed):
        reason = (
            "No checkpoint is saved on the exception: it has broken off an optimizer step, after"
            " which some parameters may have moved and others not."
        )
    elif failed is not None and not begun:
        reason = "No checkpoint is saved on the exception, since training had not begun."
    elif trainer._checkpoint_connector._loaded_checkpoint:
        reason = (
            "A checkpoint was asked for before the run has the steps and the optimizer's state of"
            " the checkpoint that it resumes: nothing is saved. Save in on_train_start, not in"
            " on_fit_start, and leave a LearningRateFinder out of a run that is resumed, or use"
            ' strategy="wlb".'
        )
    else:
        return
    if failed is None:
        raise MisconfigurationException(reason)
    rank_zero_warn(reason)
    # Lightning skips these calls if a callback's on_exception raises.
    trainer.strategy.on_exception(failed)
    for logger in trainer.loggers:
        logger.finalize("failed")
    trainer._teardown()
    raise failed


def _has_broken_step_off(trainer: L.Trainer, failed: BaseException) -> bool:
    """Whether an exception was raised in an optimizer step, but not in its closure.

    Optimizers that call it once move parameters after it; a scheduler's step comes after theirs.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    rates = loop.scheduler_progress.current
    if rates.ready > rates.completed:
        return True
    if trainer.lightning_module.automatic_optimization:
        steps = loop.automatic_optimization.optim_progress.optimizer.step.current
    else:
        steps = loop.manual_optimization.optim_step_progress.current
    # Lightning calls forward and backward in a closure, and then hooks in _after_closure.
    names = {frame.f_code.co_name for frame, _ in walk_tb(failed.__traceback__)}
    return steps.ready > steps.completed and names.isdisjoint({"closure", "_after_closure"})


def fit_of(trainer: L.Trainer, before: object) -> object:
    """What identifies a Trainer's fit, also in a copy; in a learning rate search ``before``."""
    return before if called_by("_lr_find") else trainer.fit_loop.epoch_progress


def has_other_weights(trainer: L.Trainer | None, fit: object, tokens: int) -> bool:
    """Whether a module's weights may be others than those after the Trainer's steps; then it warns.

    ``fit``: the fit whose weights they are. ``tokens``: those seen; without any they are new.
    """
    if trainer is None or fit is fit_of(trainer, fit) or not (trainer.global_step or tokens):
        return False
    rank_zero_warn(
        f"The weights may not be those after this Trainer's {trainer.global_step} steps: an"
        " evaluation has loaded a checkpoint, or another Trainer or module has been there since. A"
        " fit goes on from them, but cannot resume from a checkpoint of them."
    )
    return True


def refuse_evaluated() -> NoReturn:
    """Raise MisconfigurationException: a checkpoint's weights do not belong to its steps."""
    raise MisconfigurationException(
        "A fit cannot resume from this checkpoint: it was saved after an evaluation had loaded"
        " another one (trainer.test(ckpt_path=...)), or another Trainer or module had been there,"
        " with the steps of a fit. Resume from one of the fit; this one serves to evaluate."
    )


def refuse_prediction() -> NoReturn:
    """Raise MisconfigurationException: there is no ``trainer.predict``."""
    raise MisconfigurationException(
        "trainer.predict is not there: a step's documents are split over ranks, and no rank has the"
        " logits of a whole document. For losses use WLBDataModule(test_documents=...) and"
        " trainer.test; to score or generate, take the model elsewhere: lightning-wlb export writes"
        " a Hugging Face folder, and LanguageModule.load_from_checkpoint reads a folder."
    )
