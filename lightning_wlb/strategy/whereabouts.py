"""Where the main thread of this process stands in its run: it writes, other threads read.

A run that hangs shows nothing, so each rank notes what it is about to do, and the watchdog
(:mod:`.watchdog`) tells those notes when no rank gets on.

Cost: a few attribute writes for an action, below a microsecond; the text is made when it is asked
for.
"""

from __future__ import annotations

import time

from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.workers import WAIT
from lightning_wlb.schedule.actions import Action

BETWEEN, RUNNING, EXCHANGING, REDUCING, CALLBACKS, AFTER, LOADING = range(7)
"""Parts of a step in the order in which every rank passes them."""


class Whereabouts:
    """What the main thread does, and how far it is."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._doing: str | Action = ""
        self.begin()

    def begin_step(self, batch: StepBatch) -> None:
        """A step or an evaluation's batch is about to run on all ranks."""
        self._runs += 1
        self._batch = batch
        self.note(RUNNING, "its beginning")

    def note(self, part: int, doing: str | Action) -> None:
        """The main thread goes on to ``doing``, in this part of its step."""
        self._part, self._doing, self._since = part, doing, time.monotonic()

    def begin(self) -> None:
        """A run begins; an earlier one's batch may be freed."""
        self._batch, self._runs = None, 0
        self.note(BETWEEN, "setting up")

    @property
    def action(self) -> Action | None:
        """The action that runs, or that ran last where the step is not beyond it."""
        return self._doing if isinstance(self._doing, Action) else None

    def progress(self) -> tuple[int, int]:
        """Steps that have begun, and the part of the last one: less is behind."""
        return self._runs, self._part if WAIT.since is None else LOADING

    def seconds(self) -> float:
        """How long it has been there."""
        since = self._since if WAIT.since is None else max(self._since, WAIT.since)
        return time.monotonic() - since

    def __str__(self) -> str:
        batch = self._batch
        step = "before the first step" if batch is None else f"step {batch.plan.step}"
        if WAIT.since is not None:
            return f"{step}, then waiting for the loader"
        doing = self._doing
        if batch is None or not isinstance(doing, Action):
            return f"{step}, {doing}"
        replica = batch.units
        slices = replica.forward[doing.micro_batch].slices
        documents = sorted({replica.slices[index].document for index in slices})
        shown = ", ".join(map(str, documents[:8])) + (", ..." if len(documents) > 8 else "")
        return f"{step}, action {doing} of documents {shown}"


HERE = Whereabouts()
"""That of this process."""
