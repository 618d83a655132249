"""How far the main thread of this process is in its run: it writes, other threads read.

A run that hangs shows nothing, so each rank notes what it is about to do, and the watchdog
(:mod:`.watchdog`) reports these notes when no rank makes progress.

Cost: one attribute write for an action, below a microsecond; text is made when it is asked for.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.loader_workers import WAIT
from lightning_wlb.schedule.actions import Action

BETWEEN, RUNNING, EXCHANGING, REDUCING, OPTIMISING, CALLBACKS, AFTER, LOADING = range(8)
"""Parts of a step in the order in which every rank passes them."""


class _Moment(NamedTuple):
    runs: int  # how many steps and evaluated batches have begun
    batch: StepBatch | None  # the last of them
    part: int
    doing: str | Action
    since: float  # in seconds of ``time.monotonic``


class Progress:
    """What the main thread of this process does, and how far it is."""

    def __init__(self) -> None:
        # Replaced as a whole: another thread must not see one step's batch and another's action.
        self._now: _Moment
        self.begin()

    def begin_step(self, batch: StepBatch) -> None:
        """Note that a step or an evaluation's batch is about to run on all ranks."""
        runs = self._now.runs + 1
        self._now = _Moment(runs, batch, RUNNING, "its beginning", time.monotonic())

    def note(self, part: int, doing: str | Action) -> None:
        """Note what the main thread does from now on, and in which part of its step."""
        self._now = _Moment(self._now.runs, self._now.batch, part, doing, time.monotonic())

    def begin(self) -> None:
        """Note that a run begins or has ended; its batch may be freed."""
        self._now = _Moment(0, None, BETWEEN, "setting up", time.monotonic())

    @property
    def action(self) -> Action | None:
        """The action that runs, or ran last in this part of the step; None in other parts."""
        doing = self._now.doing
        return doing if isinstance(doing, Action) else None

    @property
    def batch(self) -> StepBatch | None:
        """The batch of the step that runs; None before, between and after steps."""
        return self._now.batch if RUNNING <= self.part <= OPTIMISING else None

    @property
    def part(self) -> int:
        """Which part of its step the main thread is in."""
        return self._now.part if WAIT.since is None else LOADING

    def progress(self) -> tuple[int, int]:
        """Steps that have begun, and the part of the last one; a rank with fewer is behind."""
        return self._now.runs, self.part

    def seconds(self) -> float:
        """Seconds for which the main thread has been doing what it does now."""
        waits = WAIT.since
        since = self._now.since if waits is None else max(self._now.since, waits)
        return time.monotonic() - since

    def __str__(self) -> str:
        _, batch, _, doing, _ = self._now
        step = "before the first step"
        if batch is not None:
            plan = batch.plan
            step = f"step {plan.step}"
            if plan.schemes:
                step += f" on the pipeline of {plan.schemes[batch.replica]}"
        if WAIT.since is not None:
            return f"{step}, then waiting for the loader"
        if batch is None or not isinstance(doing, Action):
            return f"{step}, {doing}"
        replica = batch.own_plan
        slices = replica.forward[doing.micro_batch].slices
        documents = sorted({replica.slices[index].document for index in slices})
        shown = ", ".join(map(str, documents[:8])) + (", ..." if len(documents) > 8 else "")
        return f"{step}, action {doing} of documents {shown}"


PROGRESS = Progress()
"""The progress of this process."""
