"""WLB-LLM's variable-length packing by work, with outlier queues (Algorithm 1).

Long pieces wait in the outlier queues (:mod:`~lightning_wlb.planning.outlier_queues`) until there
is one for each micro-batch. They and the others are packed by work under the cap
(:func:`~lightning_wlb.planning.longest_first.deal_capped`); what does not fit is carried to the
next step.

Departures from the listing as printed (docs/design.md, "Where we left the papers"): a piece may
fill a micro-batch exactly, the carried pieces are those of this step only, and ages are bounded: a
queue lets a piece through that has waited ``max_age`` steps, which is rare.

Cost: O(P·log P + P·log N) for P pieces in N micro-batches, below a millisecond. Not for a cap of C:
without room above the window it cannot add short documents beside long ones, and the carried list
grows until the epoch's drain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_wlb.arguments import whole, wholes
from lightning_wlb.plan import Piece
from lightning_wlb.planning.longest_first import deal_capped
from lightning_wlb.planning.outlier_queues import (
    check_thresholds,
    overdue,
    release,
    thresholds_from_lengths,
)
from lightning_wlb.planning.packing.base import (
    MicroBatches,
    Packer,
    PackingOptions,
    Rules,
    as_lists,
    as_pieces,
    check_fits,
)


@dataclass(frozen=True)
class WlbOptions(PackingOptions):
    """Options of ``wlb``.

    Args:
        queues: number of outlier queues whose thresholds are set from the length distribution;
            0 for no delay.
        thresholds: least tokens of each outlier queue, strictly increasing; overrides ``queues``.
        max_age: steps after which a piece waits no longer (unless more than 2·N micro-batches
            would be needed: one document of many global batches).
    """

    # The thresholds are in the fingerprint as they are resolved.
    decide_data: ClassVar[tuple[str, ...]] = ("max_age",)

    queues: int = 2
    thresholds: tuple[int, ...] | None = None
    max_age: int = 12

    def __post_init__(self) -> None:
        object.__setattr__(self, "queues", whole("queues", self.queues, 0))
        object.__setattr__(self, "max_age", whole("max_age", self.max_age, 1))
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", wholes("thresholds", self.thresholds))

    def check(self, window: int) -> None:
        """Refuse thresholds that do not increase up to the window."""
        if self.thresholds is not None:
            check_thresholds(self.thresholds, window)


class WlbPacker(Packer):
    """Outlier queues before the greedy packing, heaviest-first dealing of micro-batches after."""

    Options: ClassVar[type[PackingOptions]] = WlbOptions

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        options: WlbOptions = rules.options
        self.max_age = options.max_age
        if options.thresholds is None:
            self.thresholds = thresholds_from_lengths(
                rules.lengths, rules.window, options.queues, rules.work.total
            )
        else:
            self.thresholds = options.thresholds
        self._queues: list[list[Piece]] = [[] for _ in self.thresholds]

    @property
    def held(self) -> list[Piece]:
        """Carried pieces, then those of the queues."""
        return [*self.carried, *(piece for queue in self._queues for piece in queue)]

    def reset(self) -> None:
        """Start an epoch with empty queues."""
        super().reset()
        self._queues = [[] for _ in self.thresholds]

    def admit(self, batch: list[Piece], step: int) -> list[Piece]:
        """The pieces that do not wait, and those that the queues let through."""
        released, queues = release(batch, self._queues, self.thresholds, self.rules.micro_batches)
        late, self._queues = overdue(queues, step - self.max_age)
        return released + late

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """Algorithm 1, lines 16-28."""
        check_fits(pieces, self.rules.cap)
        return deal_capped(pieces, bins, self.rules.cap, self.rules.work.total)

    def state_dict(self) -> dict[str, Any]:
        """Carried pieces and queues."""
        return {**super().state_dict(), "queues": [as_lists(queue) for queue in self._queues]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self._queues = [as_pieces(queue) for queue in state["queues"]]
