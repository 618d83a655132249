"""WLBDataModule: documents in, Lightning data loaders of step batches out.

One batch of the loader is this rank's part of one optimiser step of the whole mesh. One pass of the
loader is one epoch over the documents, with drained queues. Every checkpoint holds the position in
the documents after the last optimiser step (:mod:`lightning_wlb.data.loader`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import lightning.pytorch as L
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_wlb.argument_checks import choice, whole
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data import open_documents as opening
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.data.planning_context import PlanningStrategy, context_of
from lightning_wlb.data.stores.document_store import DocumentStore, name_of
from lightning_wlb.data.stores.mixture import MixedDocuments
from lightning_wlb.data.trainer_guards import (
    called_by,
    keep_hooks,
    refuse_evaluated,
    refuse_half_states,
    refuse_other_namespace,
    refuse_prediction,
    refuse_repeats,
    refuse_two_runs,
    refuse_without_position,
    saving_trainer,
)
from lightning_wlb.planning import DataSettings
from lightning_wlb.prediction.predictor import mean_context_of
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS


class WLBDataModule(L.LightningDataModule):
    """Documents of any length as balanced optimiser steps: one batch is one step.

    Args:
        documents: anything that :func:`~lightning_wlb.data.open_documents.documents` opens: the
            path of a corpus, a mapping ``{"path": ..., option: value}``, a store, sequences of
            token numbers, or ``"stdlib"`` (the standard library's top-level definitions as bytes).
        context_window: most tokens of a piece, C.
        micro_batches: N, the size of a global batch in micro-batches of C tokens: over all replicas
            a step takes the next pieces of documents, as many as come nearest to N·C tokens.
        packing: a method such as ``"wlb"``, or with options ``{"method": "wlb", "queues": 3}``
            (see docs/guide/packing.md); ``"auto"`` takes the plan that is fastest in simulation.
        cap: most tokens of a micro-batch over its context-parallel group; None: the packing's
            default (C for ``auto`` and ``original``, 1.5·C for ``wlb``).
        long_documents: whether documents longer than the context window are cut into pieces
            (``"split"``), cut off (``"truncate"``) or refused (``"error"``).
        sharding: how a micro-batch's tokens are spread over the context-parallel group: a name in
            ``lightning_wlb.sharding.SHARDINGS``, or ``"adaptive"``: for each micro-batch the one
            with the least predicted attention latency.
        profile: the device profile by which ``"adaptive"`` sharding and ``"auto"`` packing predict,
            the same on every rank: a shipped name (``"h100"``), a file of ``lightning-wlb
            profile``, or a :class:`~lightning_wlb.cost.profile.Profile`. None: with
            ``strategy="wlb"`` on GPUs, or if the mesh is searched, the device's shipped profile;
            else, as with ``"none"``, the reference kernel cost and work in FLOPs.
        seed: decides the order of documents and which of them are held out.
        shuffle: a new order each epoch; False: the store's order.
        max_tokens: end the run with the step that reaches this many tokens; do not bound the epochs
            then (``Trainer(max_epochs=-1)``).
        num_workers: loader worker processes, which plan and read ahead of training; more than one
            helps only if reading is slow. 0: the training process does it between steps.
        validation_documents: further documents, or how many of ``documents`` to hold out.
        test_documents: further documents for ``trainer.test``, or how many others to hold out.

    Attributes:
        plans_by_work: whether ``profile="none"``, so that no device profile is used.

    Raises:
        ValueError: unknown or missing documents, more held-out documents than there are, or
            settings that contradict each other.
        MisconfigurationException: when a Trainer runs it: a LightningModule without
            ``model_shape``, a vocabulary smaller than the documents', data parallelism with a
            strategy that does not divide the plan, or a Trainer of another namespace.
    """

    def __init__(
        self,
        documents: opening.Documents,
        *,
        context_window: int,
        micro_batches: int,
        packing: str | Mapping[str, Any] = "auto",
        cap: int | None = None,
        long_documents: Literal["split", "truncate", "error"] = "split",
        sharding: str = ADAPTIVE,
        profile: str | Profile | None = None,
        seed: int = 0,
        shuffle: bool = True,
        max_tokens: int | None = None,
        num_workers: int = 1,
        validation_documents: int | opening.Documents = 0,
        test_documents: int | opening.Documents = 0,
    ) -> None:
        self._trainer: L.Trainer | None = None
        self._consumed = ConsumedState()
        # None until there is a Trainer, so that the data module can be pickled.
        self._positions: WeakKeyDictionary[L.Trainer, ConsumedState] | None = None
        self._opened: tuple[DocumentStore, DocumentStore | None, DocumentStore | None] | None = None
        self._described = False
        super().__init__()
        self.settings = DataSettings(
            context_window, micro_batches, packing, cap, long_documents, seed, shuffle, max_tokens
        )
        opening.check_documents("documents", documents)
        self.documents = documents
        self.validation_documents = opening.documents_or_number(
            "validation_documents", validation_documents
        )
        self.test_documents = opening.documents_or_number("test_documents", test_documents)
        self.sharding = choice("sharding", sharding, (ADAPTIVE, *SHARDINGS))
        self.plans_by_work = profile == "none"
        given = None if self.plans_by_work else profile
        self.profile = Profile.load(given) if isinstance(given, str) else given
        self.num_workers = whole("num_workers", num_workers, 0)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = "on_after_batch_transfer", "state_dict", "load_state_dict"
        keep_hooks(WLBDataModule, cls, names)

    @property
    def trainer(self) -> L.Trainer | None:
        """The Trainer that runs the data module; each Trainer has its own position."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        home = type(trainer).__module__
        if home.startswith("pytorch_lightning."):
            refuse_other_namespace(f"WLBDataModule was given to a Trainer of {home}.")
        if trainer is not None:  # Lightning sets it at each run
            refuse_two_runs(self._trainer, trainer, self)
            # What an earlier run was refused, from which this one would go on.
            trainer._checkpoint_connector._loaded_checkpoint = {}
            if self._positions is None:
                self._positions = WeakKeyDictionary()
            self._consumed = self._positions.setdefault(trainer, ConsumedState())
            self._consumed.begun = False
            if trainer.state.fn == TrainerFn.FITTING:  # a fit makes new optimizers
                self._consumed.anew = trainer.global_step > 0
        self._trainer = trainer

    def __iter__(self) -> NoReturn:
        """Raise an error: a Trainer that does not know this data module takes it for a loader."""
        refuse_other_namespace("WLBDataModule is not a loader.")

    def prepare_data(self) -> None:
        """Open the documents on one rank of each node first: it tokenises or copies them once."""
        self._stores()

    def setup(self, stage: str) -> None:
        """Open the documents; raise MisconfigurationException if the Trainer repeats batches."""
        self._stores()
        if stage == TrainerFn.FITTING and self.trainer is not None:
            refuse_repeats(self.trainer)

    def train_dataloader(self) -> StepLoader:
        """The steps of one epoch, or of the rest of the current epoch."""
        dataset = self._dataset(self._stores()[0], self.settings)
        if not self._described:
            self._described = True
            for sentence in dataset.describe():
                rank_zero_info(sentence)
        return self._loader(dataset, lambda: self._begin_at(dataset))

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        """The steps of one pass over the validation documents, in the store's order."""
        store = self._stores()[1]
        if store is None:
            if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
                raise MisconfigurationException(
                    "WLBDataModule has no validation_documents: give some, or a number to hold out."
                )
            # An empty list means no validation, of which Lightning would warn.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        return self._evaluation(store)

    def test_dataloader(self) -> StepLoader:
        """The steps of one pass over the test documents, in the store's order."""
        store = self._stores()[2]
        if store is None:
            raise MisconfigurationException("No test_documents: give some, or a number of them.")
        return self._evaluation(store)

    def predict_dataloader(self) -> NoReturn:
        """Raise an error, see :func:`.refuse_prediction`."""
        refuse_prediction()

    def _evaluation(self, store: DocumentStore) -> StepLoader:
        if isinstance(store, MixedDocuments):
            raise MisconfigurationException(
                f"{store!r} is a mixture, whose stores are repeated in proportions, but validation"
                " and test pass every document once. Give one store, or a number to hold out."
            )
        settings = replace(self.settings, shuffle=False, max_tokens=None)
        return self._loader(self._dataset(store, settings), lambda: None)

    @property
    def store(self) -> DocumentStore:
        """The opened documents to train on, without held-out documents."""
        return self._stores()[0]

    @property
    def mean_context(self) -> int:
        """Tokens that a token attends to, its own included, on average over the documents.

        The strategy splits layers into stages by cost, and attention's part depends on it.
        """
        return mean_context_of(np.asarray(self._stores()[0].lengths), self.settings.context_window)

    def name_of(self, document: int) -> str:
        """The name of a training document in messages, by its number in plans."""
        return name_of(self._stores()[0], document)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the batch: its state becomes the run's position with the next optimiser step."""
        if self.trainer is not None and self.trainer.training:
            refuse_without_position(batch)
            self._consumed.begin(batch, self.trainer.global_step)
            loop = self.trainer.fit_loop.epoch_loop
            # Lightning would count a step that an exception broke off in later batches, too.
            loop.manual_optimization.optim_step_progress.reset_on_restart()
            progress = loop.batch_progress
            if batch.state["epoch"] != batch.plan.epoch:
                # With limit_train_batches Lightning does not check whether a batch follows.
                progress.is_last_batch = True
            elif batch.last:
                # No batch follows, but the epoch is not over: a resumed run continues in it.
                limit = self.trainer.num_training_batches
                progress.is_last_batch = progress.current.ready + 1 >= limit
            if batch.last:
                self._stop(self.trainer, self.trainer.global_step + 1)
        return batch

    @classmethod
    def load_from_checkpoint(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: Lightning's method would import and call what a checkpoint names."""
        raise ValueError(
            f"{cls.__name__}.load_from_checkpoint: a checkpoint does not open documents. Make a"
            f" {cls.__name__} of its arguments; trainer.fit(..., ckpt_path=...) restores the run's"
            " position in the documents."
        )

    def state_dict(self) -> dict[str, Any]:
        """The planner's state after the last optimiser step, None before the first step.

        It is never an empty dictionary, which Lightning would not restore: a run that goes back to
        its beginning, as after a search for a learning rate, would then keep its position.
        """
        trainer, at = self.trainer, self._consumed
        if (saving := saving_trainer()) not in (None, trainer) and self._positions is not None:
            # Another Trainer may have run with this data module since.
            trainer, at = saving, self._positions.get(saving, ConsumedState())
        if trainer is not None:
            planned = isinstance(trainer.strategy, PlanningStrategy)
            steps = trainer.global_step - at.since
            refuse_half_states(trainer, steps, at.begun, at.anew, planned)
        mixed = {name: True for name in ("evaluated", "anew") if getattr(at, name)}
        return {"planner": at.current(trainer.global_step if trainer else 0), **mixed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, on this or another mesh."""
        trainer, mixed = self.trainer, "evaluated" in state_dict
        fits = trainer is None or trainer.state.fn == TrainerFn.FITTING
        if fits or (trainer and trainer.global_step):  # else the fit that may follow begins anew
            self._consumed.restore(state_dict["planner"])
        if trainer is not None:
            if fits and mixed and not called_by("_lr_find"):
                refuse_evaluated()
            self._consumed.evaluated, self._consumed.anew = mixed or not fits, "anew" in state_dict
            # At the start of fit a search for a learning rate has begun to read elsewhere.
            loop: Any = trainer.fit_loop
            loop._combined_loader = None
            # Else the loop may skip the rest of the current epoch, with its end.
            loop.epoch_loop.val_loop._has_run = False

    def _begin_at(self, dataset: StepDataset) -> dict[str, Any] | None:
        state = self._consumed.current(0 if self.trainer is None else self.trainer.global_step)
        if self.settings.max_tokens is not None and state is not None:
            # A run resumed after its end finds no steps and would run empty epochs for ever.
            dataset.state = state
            if dataset.planner().finished and self.trainer is not None:
                self._stop(self.trainer, self.trainer.global_step)
        return state

    def _stop(self, trainer: L.Trainer, steps: int) -> None:
        """End the run after ``steps`` optimiser steps, because of ``max_tokens``."""
        epochs = trainer.current_epoch + 1
        for name, reached, when in (
            ("min_steps", steps, f"after {steps} steps"),
            ("min_epochs", epochs, f"in epoch {epochs}"),
        ):
            least = getattr(trainer, name)
            if least is not None and least > reached:
                raise MisconfigurationException(
                    f"max_tokens={self.settings.max_tokens} is reached {when}, but"
                    f" Trainer({name}={least}) asks for more. Raise max_tokens or lower {name}."
                )
        trainer.should_stop = True

    def _stores(self) -> tuple[DocumentStore, DocumentStore | None, DocumentStore | None]:
        """The documents to train on, to validate on and to test on; None if there are none."""
        if self._opened is None:
            store, others = opening.documents(self.documents), []
            for name in ("validation_documents", "test_documents"):
                given, other = getattr(self, name), None
                if not isinstance(given, int):
                    other = opening.documents(given)
                elif given:
                    store, other = opening.hold_out(store, given, self.settings.seed, name)
                others.append(other)
            opening.warn_of_vocabularies([store, *others])
            self._opened = store, others[0], others[1]
        return self._opened

    def _dataset(self, store: DocumentStore, settings: DataSettings) -> StepDataset:
        trainer = self.trainer
        if trainer is None:
            raise MisconfigurationException(
                "WLBDataModule needs a Trainer to know its place in the mesh and the model's"
                " shape: call trainer.fit(model, datamodule)."
            )
        context = context_of(trainer, self)
        dataset = StepDataset.for_model(
            store,
            settings,
            context.shape,
            context.rank,
            self.sharding,
            context.predictor,
            context.activation_checkpointing,
        )
        if settings is self.settings:  # only training steps may leave the mesh
            dataset.step_chooser = context.chooser
        return dataset

    def _loader(
        self, dataset: StepDataset, begin_at: Callable[[], dict[str, Any] | None]
    ) -> StepLoader:
        # Every worker plans all steps, so Lightning's advice to start as many workers as there are
        # cores does not apply.
        warnings.filterwarnings("ignore", "The '(train|val|test)_dataloader' does not have many")
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return StepLoader(dataset, begin_at, self.num_workers, pin)


class ConsumedState:
    """The planner's state after the last optimiser step, even if the loader has read ahead."""

    def __init__(self) -> None:
        self._consumed: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self.since = 0  #: optimizer steps that had been taken when the last batch began
        self.begun = False  #: whether the run has begun a batch, apart from learning-rate searches
        self.anew = False  #: whether optimizers have been made since, and not restored
        self.evaluated = False  #: whether an evaluation has read a checkpoint since the last batch

    def begin(self, batch: StepBatch, global_step: int) -> None:
        """Begin a batch after ``global_step`` optimizer steps.

        Raises:
            MisconfigurationException: the batch does not follow the last optimizer step.
        """
        self._consumed = self.current(global_step)
        due, found = self._consumed["step"] if self._consumed else 0, batch.plan.step
        if found != due:
            mend = "Restart every reader that was begun before the position was restored."
            if self._pending is not None and found == self._pending["step"]:
                mend = "Take an optimizer step for each batch, which holds all its micro-batches."
            raise MisconfigurationException(
                f"Step {due} of the documents is due, but the loader gives step {found}: documents"
                f" would be repeated or lost. {mend}"
            )
        self._pending, self.since = batch.state, global_step
        self.begun, self.anew, self.evaluated = True, False, False

    def current(self, global_step: int) -> dict[str, Any] | None:
        """The state after ``global_step`` optimizer steps; None: the run's beginning."""
        return self._pending if self._pending and global_step > self.since else self._consumed

    def restore(self, state: dict[str, Any] | None) -> None:
        """Forget the batches that were begun, and continue from ``state``."""
        self._consumed, self._pending, self.begun = state, None, False
