"""WLBDataModule: documents in, Lightning data loaders of step batches out.

One batch of the loader is one optimiser step of the whole mesh, seen from this rank. One pass of
the loader is one epoch over the documents, queues drained. Every checkpoint holds the position in
the documents: that of the last optimiser step taken (:mod:`lightning_wlb.data.loader`).
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
    refuse_without_position,
)
from lightning_wlb.planning import DataSettings
from lightning_wlb.prediction.predictor import mean_context_of
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS


class WLBDataModule(L.LightningDataModule):
    """Documents of any length as balanced optimiser steps: one batch is one step.

    Args:
        documents: whatever :func:`~lightning_wlb.data.open_documents.documents` opens: a path of a
            corpus, a mapping ``{"path": ..., option: value}``, a document store, sequences of token
            numbers, or ``"stdlib"`` (the standard library's top-level definitions as bytes).
        context_window: most tokens of a piece, C.
        micro_batches: micro-batches' worth of tokens in a global batch, N: each step's global
            batch is the next pieces of documents, over all replicas, as many as come nearest to
            N·C tokens.
        packing: a method such as ``"wlb"``, or with options ``{"method": "wlb", "queues": 3}``, as
            docs/guide/packing.md lists them; ``"auto"`` takes the one simulated to be fastest.
        cap: most tokens of a micro-batch over its context-parallel group; None: the packing's
            default (C for ``auto`` and ``original``, 1.5·C for ``wlb``).
        long_documents: what becomes of documents above the context window: ``"split"``,
            ``"truncate"`` or ``"error"``.
        sharding: how a micro-batch's tokens are spread over the context-parallel group: a name
            in ``lightning_wlb.sharding.SHARDINGS``, or ``"adaptive"``, the one of least
            predicted attention latency for each micro-batch.
        profile: the device profile by which ``"adaptive"`` sharding and ``"auto"`` packing
            predict, the same on every rank: a shipped name (``"h100"``), the file that
            ``lightning-wlb profile`` wrote, or a :class:`~lightning_wlb.cost.profile.Profile`.
            None: with ``strategy="wlb"`` on GPUs, or a mesh that is searched for, the shipped one
            of the device; else, as with ``"none"``, the reference kernel cost and work in FLOPs.
        seed: decides the order of documents and which of them are held out.
        shuffle: a new order each epoch; False: the store's order.
        max_tokens: end the run with the step that reaches this many tokens; leave the epochs open
            then (``Trainer(max_epochs=-1)``).
        num_workers: loader worker processes, which plan and read ahead of training; more than one
            helps only where reading is slow. 0: in the training process, between steps.
        validation_documents: further documents, or how many of ``documents`` to hold out.
        test_documents: further documents for ``trainer.test``, or how many others to hold out.

    Attributes:
        plans_by_work: whether no device profile is wanted: ``profile="none"``.

    Raises:
        ValueError: documents that are not known or not there, more documents held out than there
            are, or settings that contradict each other.
        MisconfigurationException: when a Trainer runs it: a LightningModule without
            ``model_shape``, a vocabulary smaller than the documents', data parallelism under a
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
        # None before there is a Trainer, so that it can be pickled.
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
        """The Trainer that runs the data module; each has a position of its own."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        home = type(trainer).__module__
        if home.startswith("pytorch_lightning."):
            refuse_other_namespace(f"WLBDataModule was given to a Trainer of {home}.")
        if trainer is not None:  # for each run of it
            if self._positions is None:
                self._positions = WeakKeyDictionary()
            self._consumed = self._positions.setdefault(trainer, ConsumedState())
            self._consumed.begun = False
            if trainer.state.fn == TrainerFn.FITTING:  # which makes new optimizers
                self._consumed.anew = trainer.global_step > 0
        self._trainer = trainer

    def __iter__(self) -> NoReturn:
        """Refuse: a Trainer that does not know this data module takes it for a loader."""
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
        """The steps of one epoch, or of the rest of the epoch that the run stands in."""
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
                    "WLBDataModule has no validation documents (validation_documents=0). Give a"
                    " document store, or the number of documents to hold out."
                )
            # An empty list says that there is nothing to validate on, and Lightning warns of it.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        return self._evaluation(store)

    def test_dataloader(self) -> StepLoader:
        """The steps of one pass over the test documents, in the store's order."""
        store = self._stores()[2]
        if store is None:
            raise MisconfigurationException(
                "WLBDataModule has no test documents. Give WLBDataModule(test_documents=...)"
                " documents, or the number of documents to hold out."
            )
        return self._evaluation(store)

    def predict_dataloader(self) -> NoReturn:
        """Refuse, as :func:`.refuse_prediction` says."""
        refuse_prediction()

    def _evaluation(self, store: DocumentStore) -> StepLoader:
        if isinstance(store, MixedDocuments):
            raise MisconfigurationException(
                f"{store!r} is a mixture, whose stores are repeated in proportions, but validation"
                " and test pass every document once. Give one store, or a number of documents to"
                " hold out."
            )
        settings = replace(self.settings, shuffle=False, max_tokens=None)
        return self._loader(self._dataset(store, settings), lambda: None)

    @property
    def store(self) -> DocumentStore:
        """The documents to train on, opened; those that are held out are not among them."""
        return self._stores()[0]

    @property
    def mean_context(self) -> int:
        """Tokens that a token attends to, its own included, on average over the documents.

        The strategy splits layers into stages by cost, and attention's part depends on it.
        """
        return mean_context_of(np.asarray(self._stores()[0].lengths), self.settings.context_window)

    def name_of(self, document: int) -> str:
        """The name that messages give a document to train on, by its number in plans."""
        return name_of(self._stores()[0], document)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the batch whose state becomes the run's with the next optimiser step."""
        if self.trainer is not None and self.trainer.training:
            refuse_without_position(batch)
            self._consumed.begin(batch, self.trainer.global_step)
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            if batch.state["epoch"] != batch.plan.epoch:
                # With limit_train_batches Lightning does not look whether there is another one.
                progress.is_last_batch = True
            elif batch.last:
                # No other batch follows, yet the epoch is not over: whoever resumes goes on in it.
                limit = self.trainer.num_training_batches
                progress.is_last_batch = progress.current.ready + 1 >= limit
            if batch.last:
                self._stop(self.trainer, self.trainer.global_step + 1)
        return batch

    @classmethod
    def load_from_checkpoint(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: Lightning's would import and call whatever a checkpoint names."""
        raise ValueError(
            f"{cls.__name__}.load_from_checkpoint: documents are not opened by a checkpoint. Make a"
            f" {cls.__name__} of its arguments; trainer.fit(..., ckpt_path=...) restores where the"
            " run stood in them."
        )

    def state_dict(self) -> dict[str, Any]:
        """The planner's state after the last step taken, None before the first step.

        (Lightning would not restore an empty dictionary, and leave a run that goes back to its
        beginning where it was, as after a search for a learning rate.)
        """
        at = self._consumed
        if (trainer := self.trainer) is not None:
            planned = isinstance(trainer.strategy, PlanningStrategy)
            steps = trainer.global_step - at.since
            refuse_half_states(trainer, steps, at.begun, at.anew, planned)
        mixed = {name: True for name in ("evaluated", "anew") if getattr(at, name)}
        return {"planner": self._state(), **mixed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stand where :meth:`state_dict` stood, on this or another mesh."""
        self._consumed.restore(state_dict["planner"])
        if self.trainer is not None:
            fits, mixed = self.trainer.state.fn == TrainerFn.FITTING, "evaluated" in state_dict
            if fits and mixed and not called_by("_lr_find"):
                refuse_evaluated()
            self._consumed.evaluated, self._consumed.anew = mixed or not fits, "anew" in state_dict
            # A search for a learning rate has begun to read elsewhere, on fit's start.
            loop: Any = self.trainer.fit_loop
            loop._combined_loader = None
            # Else the epoch that the run goes on in may be over before it begins, without an end.
            loop.epoch_loop.val_loop._has_run = False

    def _state(self) -> dict[str, Any] | None:
        return self._consumed.current(0 if self.trainer is None else self.trainer.global_step)

    def _begin_at(self, dataset: StepDataset) -> dict[str, Any] | None:
        state = self._state()
        if self.settings.max_tokens is not None and state is not None:
            # A run resumed after its end finds no steps: stop it, or it passes through
            # empty epochs for ever.
            dataset.state = state
            if dataset.planner().finished and self.trainer is not None:
                self._stop(self.trainer, self.trainer.global_step)
        return state

    def _stop(self, trainer: L.Trainer, steps: int) -> None:
        """End the run after ``steps`` optimiser steps, as ``max_tokens`` asks."""
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
        """The documents to train on, to validate on and to test on, as far as there are any."""
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
        if settings is self.settings:  # An evaluation stays on the mesh.
            dataset.step_chooser = context.chooser
        return dataset

    def _loader(
        self, dataset: StepDataset, begin_at: Callable[[], dict[str, Any] | None]
    ) -> StepLoader:
        # One batch is a whole step, and every worker plans them all: Lightning's advice to start
        # as many workers as there are cores does not hold here.
        warnings.filterwarnings("ignore", "The '(train|val|test)_dataloader' does not have many")
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return StepLoader(dataset, begin_at, self.num_workers, pin)


class ConsumedState:
    """The planner's state after the last optimiser step, although the loader has read ahead."""

    def __init__(self) -> None:
        self._consumed: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self.since = 0  #: optimizer steps that had been taken when the last batch was begun
        self.begun = False  #: whether the run has begun a batch, other than of a search
        self.anew = False  #: whether optimizers are new since, and not restored
        self.evaluated = False  #: whether an evaluation has read a checkpoint since the last batch

    def begin(self, batch: StepBatch, global_step: int) -> None:
        """A batch is about to be trained on, when ``global_step`` steps have been taken.

        Raises:
            MisconfigurationException: it does not follow on the last optimizer step.
        """
        self._consumed = self.current(global_step)
        due, found = self._consumed["step"] if self._consumed else 0, batch.plan.step
        if found != due:
            mend = "Whatever has begun to read before the position was restored has to begin anew."
            if self._pending is not None and found == self._pending["step"]:
                mend = "Take an optimizer step for each batch, which holds all its micro-batches."
            raise MisconfigurationException(
                f"Step {due} of the documents is due, but the loader gives step {found}: documents"
                f" would be repeated or lost. {mend}"
            )
        self._pending, self.since = batch.state, global_step
        self.begun, self.anew, self.evaluated = True, False, False

    def current(self, global_step: int) -> dict[str, Any] | None:
        """The state once ``global_step`` steps have been taken; None: the run's beginning."""
        return self._pending if self._pending and global_step > self.since else self._consumed

    def restore(self, state: dict[str, Any] | None) -> None:
        """Forget the batches that were begun, and continue from ``state``."""
        self._consumed, self._pending, self.begun = state, None, False
