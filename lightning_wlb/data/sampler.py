"""The steps of one epoch, from wherever the run stands, and what "stands" means.

Every rank runs the same planner on the same lengths and so knows every step's plan;
:class:`StepDataset` then materialises this rank's share of it. It plans one step ahead: a batch
carries the digest of the following plan, so that the step's last collective can tell ranks that
disagree before they hang.

Planning runs ahead of the step, in a loader worker: a process, because planning is Python, and a
thread would take the interpreter's lock from the step. A worker keeps :data:`BATCHES_AHEAD` batches
ready. What training still waits is measured, and travels with the batch
(``StepBatch.wait_seconds``): next to nothing where planning and reading a step take less than
training on it, but for an epoch's first steps, when a new worker starts.

With W loader workers, each worker plans every step and makes the tensors of each W-th one. The
DataLoader collects from workers in turn, so the order is that of the plan. Planning is repeated
W times; where it costs more than reading, more workers do not help.

A batch also carries the planner's state after its step. The loader reads ahead (Lightning one
batch, loader workers several), so only a *consumed* batch moves the run's position:
:class:`ConsumedState` keeps the state of the last batch whose optimiser step was taken. A resumed
run then begins with exactly the first step that was not taken, on any mesh, with any number of
workers. The state is plain Python and equal on every rank.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_wlb.attention.sharding import ADAPTIVE
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.kernel import SegmentCost, reference_kernel_cost
from lightning_wlb.data.assembly import make_step_batch
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.documents import DocumentStore
from lightning_wlb.mesh import Rank
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.judge import Judge

BATCHES_AHEAD = 4
"""Batches that a loader worker keeps ready. More than torch's 2, because methods that pack several
global batches together plan several steps at once and then none for a while."""


class StepDataset(IterableDataset[StepBatch]):
    """The step batches of one rank: each iteration is one epoch, or the rest of one.

    Args:
        store: the documents.
        data: which documents enter a step.
        work: forward and backward work of the model, for the packing. Keys beyond its window do not
            travel.
        at: where this rank stands in the mesh.
        sharding: how micro-batches are spread over the context-parallel group: a name, or
            ``"adaptive"``.
        schedule: name of the pipeline's schedule.
        state: where to begin (a batch's ``state``); None: the first step of the first epoch.
            Set it between iterations to begin elsewhere.
        kernel_cost: of attention segments, which an adaptive sharding goes by.
        judge: what packings that try several plans of a step choose by; None: work alone.
    """

    def __init__(
        self,
        store: DocumentStore,
        data: DataSettings,
        work: Work,
        at: Rank | None = None,
        sharding: str = ADAPTIVE,
        schedule: str = "1f1b",
        state: dict[str, Any] | None = None,
        kernel_cost: SegmentCost = reference_kernel_cost,
        judge: Judge | None = None,
    ) -> None:
        self.store = store
        self.data = data
        self.work = work
        self.kernel_cost = kernel_cost
        self.judge = judge
        self.at = at or Rank()
        self.sharding = sharding
        self.schedule = schedule
        self.state = state

    def planner(self) -> Planner:
        """A planner that stands at :attr:`state`."""
        planner = Planner(
            self.store.lengths,
            self.data,
            self.work,
            self.at.mesh,
            sharding=self.sharding,
            schedule=self.schedule,
            targets=self.store.targets,
            kernel_cost=self.kernel_cost,
            judge=self.judge,
        )
        if self.state is not None:
            planner.load_state_dict(self.state)
        return planner

    def __iter__(self) -> Iterator[StepBatch]:
        worker = get_worker_info()
        share, shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        planner = self.planner()
        # A run that ended with its epoch (max_tokens) and is continued stands before an empty
        # rest of that epoch: pass over it.
        plan = planner.next_step() or planner.next_step()
        index = 0
        while plan is not None:
            state = planner.state_dict()
            following = planner.next_step()
            if following is None:
                # The epoch or the run is over: a resume must not find an empty rest of it.
                state = planner.state_dict()
            if index % shares == share:
                yield make_step_batch(
                    plan,
                    self.store,
                    self.at,
                    state,
                    next_digest=0 if following is None else following.digest,
                    last=following is None and planner.finished,
                    sliding_window=self.work.total.window,
                )
            plan = following
            index += 1


class ConsumedState:
    """The planner's state after the last optimiser step that was really taken."""

    def __init__(self) -> None:
        self._consumed: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._pending_since = 0

    def begin(self, batch: StepBatch, global_step: int) -> None:
        """A batch is about to be trained on, when ``global_step`` steps have been taken."""
        self._consumed = self.current(global_step)
        self._pending, self._pending_since = batch.state, global_step

    def current(self, global_step: int) -> dict[str, Any] | None:
        """The state once ``global_step`` steps have been taken; None: the run's beginning."""
        if self._pending is not None and global_step > self._pending_since:
            return self._pending
        return self._consumed

    def restore(self, state: dict[str, Any] | None) -> None:
        """Stand at ``state``, whatever was begun before."""
        self._consumed, self._pending = state, None


class StepLoader(DataLoader[StepBatch]):
    """A DataLoader over a :class:`StepDataset` whose every iteration begins at ``begin_at()``.

    ``state_dict`` and ``load_state_dict`` are empty on purpose: they tell Lightning that a
    checkpoint inside an epoch resumes exactly. The position itself is the data module's, because
    a loader's own would be that of the batches read ahead.

    Args:
        dataset: the steps.
        begin_at: the state that the next iteration begins at; None: the run's beginning.
        num_workers: processes that plan and read ahead; 0: none, the caller waits for it.
        pin_memory: whether batches come in page-locked memory.
    """

    def __init__(
        self,
        dataset: StepDataset,
        begin_at: Callable[[], dict[str, Any] | None],
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        # The generator of its own keeps the loader from drawing on the global random numbers: a
        # resumed run makes another number of iterators than an unbroken one.
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            # Persistent workers would begin every epoch where they began the first.
            prefetch_factor=BATCHES_AHEAD if num_workers else None,
            # Workers touch neither devices nor process groups, so that they can be forked from a
            # rank that has both. Any other start would run a script without the guard
            # `if __name__ == "__main__"` again in every worker.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            pin_memory=pin_memory,
            worker_init_fn=_ignore_users_signals,
            generator=Generator(),
        )
        self._begin_at = begin_at

    def __iter__(self) -> Any:
        assert isinstance(self.dataset, StepDataset)
        self.dataset.state = self._begin_at()
        return _timed(super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see the class."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: see the class."""


def _timed(batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """The batches, each with the time that it took to get it."""
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        batch.wait_seconds = time.perf_counter() - begin
        yield batch


def _ignore_users_signals(worker: int) -> None:
    """Leave the signals that a run can be ended by to its rank: Slurm sends them to all processes.

    A worker has inherited the rank's handlers, which are not for it.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
