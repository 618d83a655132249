"""Packing several global batches together: what the methods of WLB-LLM §3.2 and §4.1 share.

W global batches arrive at once and are packed into W·N micro-batches. These are sorted by work
and cut into W steps of N, so that micro-batches of like work run in the same step; otherwise a
single heavy one would still set the pace of its step. Balance improves with W because unlike
documents are moved apart, and so does the distance over which documents change places: the price
is randomness, which the paper's Figure 6 shows in the loss.

A piece arrives at the step at which its window opens, so its delay is its place in the window,
(W - 1)/2 steps on average.

Cost: that of the grouping, once every W steps; the other steps are read off.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.dispatch import deal_groups, longest_first
from lightning_wlb.planning.packing.base import (
    Arrivals,
    Groups,
    Mesh,
    Packer,
    Released,
    Rules,
    as_lists,
    as_pieces,
)


class WindowedPacker(Packer):
    """Groups W global batches at a time with the subclass's :meth:`group`."""

    reads: ClassVar[tuple[str, ...]] = ("packing_window", "max_age")

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._ready: list[Groups] = []  # steps packed and not yet run

    @property
    def held(self) -> list[Piece]:
        """Pieces of the steps to come, then carried ones."""
        return [
            *(piece for step in self._ready for group in step for piece in group),
            *self.carried,
        ]

    def reset(self) -> None:
        """Start an epoch, in which nothing is packed yet."""
        super().reset()
        self._ready = []

    def next_step(self, arrivals: Arrivals, step: int) -> Released:
        """The next step of the window, or the first of the next window."""
        while not self._ready:
            pieces, batches = [], 0
            while batches < self.rules.packing_window and (batch := arrivals.draw()) is not None:
                pieces += batch
                batches += 1
            if not batches:
                return super().next_step(arrivals, step)
            pieces = self.carried + pieces
            self.carried = []
            groups = self._group(pieces, step, batches * self.rules.micro_batches)
            self._ready = self._steps(groups, batches)
        return Released(self._ready.pop(0), False)

    def arrange(self, groups: Groups, mesh: Mesh) -> list[Groups]:
        """Whole micro-batches, by descending work, to the replica with the least so far."""
        return deal_groups(groups, mesh.replicas, self.rules.work, longest_first)

    def state_dict(self) -> dict[str, Any]:
        """Carried pieces, and the steps that are packed but not yet run."""
        ready = [[as_lists(group) for group in step] for step in self._ready]
        return {**super().state_dict(), "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self._ready = [[as_pieces(group) for group in step] for step in state["ready"]]

    def _steps(self, groups: Groups, batches: int) -> list[Groups]:
        """Micro-batches of like work together, at most ``batches`` steps, none empty."""
        work = self.rules.work
        filled = sorted(
            (group for group in groups if group),
            key=lambda group: (-sum(work(piece.tokens) for piece in group), min(group)),
        )
        size = max(-(-len(groups) // batches), 1)
        return [filled[first : first + size] for first in range(0, len(filled), size)]
