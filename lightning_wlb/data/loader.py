"""The steps of one epoch from the run's position on, and how that position is kept.

Every rank runs the same planner on the same lengths, so it knows every plan. A :class:`StepDataset`
makes this rank's tensors from it. It plans one step ahead, so that a batch carries the digest of
the following plan: the step's last collective tells ranks that disagree, before they hang.

Planning runs ahead of training in loader workers. With W workers each worker makes the tensors of
every W-th step, in the order of the plans. It plans these steps and, for the digest, the steps
after them; of others it only finds which pieces enter them. So W workers plan W / 2 times as fast.

The position of a run is the planner's state after a step. The step's batch carries it, since
workers have read ahead. In a user's own loop (plain PyTorch, Fabric) the position is the state of
the last yielded batch: :meth:`StepLoader.state_dict`. A Trainer requests one batch ahead of the
batch that it trains on, and saves the state of rank 0's loader only. Under a Trainer the position
is the state of the last batch whose optimiser step was taken: the data module keeps and saves it,
and tells the loader where to begin (``begin_at``).

In both cases a resumed run begins with exactly the next step, on any mesh, with any number of
workers. The state is plain Python, equal on every rank; ``{}`` before the first step.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_wlb.cost.attention_tiles import layers_kernel_cost
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data import loader_workers as workers
from lightning_wlb.data import open_documents as opening
from lightning_wlb.data.batch import StepBatch, make_step_batch
from lightning_wlb.data.open_documents import Documents
from lightning_wlb.data.store_checks import check_has_targets, checked_digests, count_targets
from lightning_wlb.data.stores.document_store import DocumentStore, check_lengths
from lightning_wlb.data.stores.mixture import MixedDocuments
from lightning_wlb.data.trainer_guards import refuse_other_loaders
from lightning_wlb.mesh import Rank
from lightning_wlb.plan import ActivationCheckpointing, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.step_chooser import StepChooser
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding import ADAPTIVE

BATCHES_AHEAD = 4
"""Batches that a loader worker keeps ready; more than torch's 2."""


@dataclass(eq=False, repr=False)
class StepDataset(IterableDataset[StepBatch]):
    """The step batches of one rank: each iteration is one epoch, or the rest of one.

    Every yielded batch moves ``state``, so that the next iteration continues where the last one
    ended or was left. :meth:`for_model` makes a dataset from documents and a model's shape.

    Args:
        store: the documents.
        data: the settings that decide which pieces enter a step.
        work: the model's work, forward + backward. Keys beyond its window are not sent.
        rank: the place of this rank in the mesh.
        sharding: how context-parallel ranks share a micro-batch, such as ``"adaptive"``.
        state: where to begin (after the step of the batch with this ``state``); None: the first
            step of the first epoch. Set it between iterations to begin elsewhere.
        predictor: predicts times for an adaptive sharding and for packings that compare plans;
            None: they use the reference kernel cost and the work.
        vocab_size: tokens outside ``[0, vocab_size)`` are refused; None: negative tokens only.
        activation_checkpointing: what backward recomputes; ``"auto"``: the least with which each
            micro-batch fits in memory by the predictor, or nothing without a predictor.
        step_chooser: may give a step other pipelines than the mesh's; None: all run on the mesh.
        recurrent: whether layers of the model carry a state from row to row.
    """

    store: DocumentStore
    data: DataSettings
    work: Work
    rank: Rank = field(default_factory=Rank)
    sharding: str = ADAPTIVE
    state: dict[str, Any] | None = None
    predictor: Predictor | None = None
    vocab_size: int | None = None
    activation_checkpointing: ActivationCheckpointing = "auto"
    step_chooser: StepChooser | None = None
    recurrent: bool = False
    has_loader: bool = field(default=False, init=False)
    """Whether a :class:`StepLoader` begins the next iteration and keeps the position."""

    @classmethod
    def for_model(
        cls,
        documents: Documents,
        data: DataSettings,
        shape: ModelShape,
        rank: Rank | None = None,
        sharding: str = ADAPTIVE,
        predictor: Predictor | None = None,
        activation_checkpointing: ActivationCheckpointing = "auto",
    ) -> Self:
        """The steps of a model of this shape, whose work on documents packings balance.

        ``documents`` is anything that :func:`~lightning_wlb.data.open_documents.documents` opens;
        ``shape`` is for example ``LanguageModule.model_shape``. Without ``rank`` there is one rank.

        Raises:
            MisconfigurationException: a vocabulary smaller than that of the documents.
            ValueError: documents that cannot be opened, or lengths that are no whole numbers > 0.
        """
        store, rank = opening.documents(documents), rank or Rank()
        check_lengths(np.asarray(store.lengths), repr(store))
        if store.vocab_size is not None and 0 < shape.vocab_size < store.vocab_size:
            raise MisconfigurationException(
                f"The documents have {store.vocab_size} different tokens, the model a vocabulary of"
                f" {shape.vocab_size}. Give the model vocab_size={store.vocab_size} or more."
            )
        check_has_targets(store)
        return cls(
            store,
            data,
            Work.of(shape),
            rank,
            sharding,
            predictor=predictor,
            vocab_size=shape.vocab_size or store.vocab_size,
            activation_checkpointing=activation_checkpointing,
            recurrent=shape.recurrent,
        )

    def planner(self) -> Planner:
        """A planner at the position ``state``."""
        predictor = self.predictor
        planner = Planner(
            self.store.lengths,
            self.data,
            self.work,
            self.rank.mesh,
            sharding=self.sharding,
            targets=partial(count_targets, self.store),
            kernel_cost=(
                partial(layers_kernel_cost, windows=self.work.total.windows)
                if predictor is None
                else predictor.latency.segment_cost
            ),
            scorer=(
                None
                if predictor is None
                else ProfileScorer(predictor, self.activation_checkpointing)
            ),
            activation_checkpointing=self.activation_checkpointing,
            mixture=self.store.shares if isinstance(self.store, MixedDocuments) else (),
            step_chooser=self.step_chooser,
        )
        if self.state is not None:
            planner.load_state_dict(self.state)
        return planner

    def __iter__(self) -> Iterator[StepBatch]:
        worker = get_worker_info()
        if not self.has_loader:
            refuse_other_loaders(worker is not None)
        self.has_loader = False
        share, shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        planner = self.planner()
        corpora = checked_digests(self.store, self.state)
        digests = {"corpora": [each.digest for each in corpora]}
        # A run that was saved at the end of an epoch begins with an empty rest, which is skipped.
        release = planner.release() or planner.release()
        plan: StepPlan | None = None
        index = 0
        while release is not None:
            state = planner.state_dict() | digests
            following = planner.release()
            if following is None:
                # The epoch or the run is over: a resumed run must not find an empty rest.
                state = planner.state_dict() | digests
            ahead: StepPlan | None = None
            if index % shares == share:
                plan = plan or planner.place(release)
                ahead = None if following is None else planner.place(following)
                batch = make_step_batch(
                    plan,
                    self.store,
                    plan.place(self.rank),
                    state,
                    next_digest=0 if ahead is None else ahead.digest,
                    last=following is None and planner.finished,
                    sliding_window=self.work.total.window,
                    vocab_size=self.vocab_size,
                    recurrent=self.recurrent,
                )
                if index == 0:
                    batch.corpora = corpora
                self.state = state
                yield batch
            release, plan = following, ahead
            index += 1

    def describe(self) -> Iterator[str]:
        """The documents and how they are packed, in sentences for the log."""
        if isinstance(self.store, MixedDocuments):
            yield self.store.describe() + "."
        lengths, planner, data = np.asarray(self.store.lengths), self.planner(), self.data
        queues = ", ".join(map(str, planner.packer.thresholds))
        queues = f", outlier queues from {queues} tokens" if queues else ""
        beyond = np.count_nonzero(lengths > data.context_window)
        longer = f"; longer than the window: {beyond:,}" if beyond else ""
        yield (
            f"Documents: {len(lengths):,} with {int(lengths.sum()):,} tokens (longest"
            f" {lengths.max():,}{longer}), about {data.micro_batches} x {data.context_window:,}"
            f" tokens per step, packing {data.packing_choice.method!r}{queues}."
        )
        if planner.dropped_tokens:
            yield (
                f"Truncation at the context window of {data.context_window} tokens drops"
                f" {planner.dropped_tokens} tokens per epoch; long_documents='split' keeps them."
            )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded batch; empty before the first step."""
        return {} if self.state is None else {"planner": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, on any mesh, with the same settings.

        Raises:
            ValueError: the state is of another kind of dataset.
        """
        if set(state_dict) - {"planner"}:
            raise ValueError(
                f"A state with the keys {sorted(state_dict)} is not that of a StepLoader: give what"
                " its state_dict() returned."
            )
        self.state = state_dict.get("planner")


class StepLoader(StatefulDataLoader[StepBatch]):
    """The loader over a :class:`.StepDataset`, with a position that survives its process.

    In a loop without a Trainer::

        for batch in loader:
            ...  # train on it
            torch.save({"loader": loader.state_dict(), ...}, path)

    Save after the batch's optimiser step. If an iteration is left (``break``), the next one
    continues it; after the last batch of an epoch the next epoch begins. With ``max_tokens`` the
    last batch has ``batch.last``, and later iterations are empty.

    Under Lightning the data module gives ``begin_at``. ``state_dict`` is then empty, and only tells
    Lightning that a checkpoint inside an epoch resumes exactly.

    Args:
        dataset: the steps. Its ``state`` is the loader's position, except with ``begin_at``.
        begin_at: returns the state at which an iteration begins, or None for the run's beginning.
            Without this function the loader keeps its position itself.
        num_workers: processes that plan and read ahead; 0: the caller waits for each batch.
        pin_memory: whether batches are in page-locked memory.
    """

    dataset: StepDataset

    def __init__(
        self,
        dataset: StepDataset,
        begin_at: Callable[[], dict[str, Any] | None] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            super().__init__(
                # A loader with a ``begin_at`` leaves the position of the given data set alone.
                dataset if begin_at is None else copy.copy(dataset),
                batch_size=None,
                num_workers=num_workers,
                # No persistent workers: they would begin every epoch where they began the first.
                prefetch_factor=BATCHES_AHEAD if num_workers else None,
                # Workers touch neither devices nor process groups, so that they can be forked from
                # a rank that has both. Any other start would run a script without the guard
                # `if __name__ == "__main__"` again in every worker.
                multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
                pin_memory=pin_memory,
                worker_init_fn=workers.begin,
                # Else each iterator would draw a global random number, and a resumed run makes
                # another number of iterators than an unbroken one.
                generator=Generator(),
                # Only equally many workers could resume from snapshots of workers, so each batch
                # carries the state after its step instead.
                snapshot_every_n_steps=None,
            )
        self.begin_at = begin_at
        self._left: Iterator[StepBatch] | None = None

    def __iter__(self) -> Any:
        begin = time.perf_counter()
        state = self.dataset.state if self.begin_at is None else self.begin_at()
        is_new = state is not self.dataset.state
        self.dataset.state = state
        # Not super().__iter__(), which also keeps the iterator (for the state_dict that is replaced
        # here), and so the workers of a loop that was left.
        self.dataset.has_loader = True  # copies in workers keep it
        with workers.safe_path():
            batches = self._get_iterator()
        self.dataset.has_loader = not self.num_workers
        workers.make_endable(batches)
        return self._hand_out(batches, time.perf_counter() - begin, is_new)

    def _hand_out(
        self, batches: Iterator[StepBatch], waited: float, is_new: bool
    ) -> Iterator[StepBatch]:
        """Yield the batches, each with the time waited for it, and move the position.

        ``waited`` is the seconds that the workers took to start, which count for the first batch.
        ``is_new`` says that the data set's state must be checked against its settings.
        """
        # Only here: Lightning's teardown would replace an error raised in ``__iter__`` by another.
        refuse_other_loaders(noted=self.begin_at is not None)
        if is_new:  # raises here rather than with a worker's traceback
            self.dataset.planner()
        handed_out = False
        while True:
            begin = time.perf_counter()
            batch = workers.WAIT.next(batches, handed_out)
            if workers.WAIT.ended:
                # The run ends: dropping the iterator now would make torch wait for stuck workers.
                self._left = batches
            if batch is None:
                return
            batch.wait_seconds = waited + time.perf_counter() - begin
            waited, handed_out = 0.0, True
            # With workers only their copies of the dataset have moved.
            self.dataset.state = batch.state
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded batch; empty if ``begin_at`` gives the position."""
        return {} if self.begin_at is not None else self.dataset.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration begin where :meth:`state_dict` was taken, without ``begin_at``.

        The number of workers, the mesh and ``max_tokens`` may differ from the run that saved the
        state. Other data settings raise ValueError when the iteration begins.

        Raises:
            ValueError: the state is of another kind of loader.
        """
        if self.begin_at is None:
            self.dataset.load_state_dict(state_dict)
