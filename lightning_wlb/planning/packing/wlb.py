"""Variable-length packing by work: the greedy of WLB-LLM Algorithm 1 (lines 16-28).

Pieces go in descending length to the micro-batch with the least work; where that would pass the
cap, to the micro-batch with the fewest tokens; where that would pass it too, the piece is carried
to the next step. Short pieces come last and even out what the long ones left, so micro-batches
end with equal work and unequal length.

Departures from the listing as printed (docs/design.md, "Where we left the papers"): a piece may
fill a micro-batch exactly (``<=`` for L_max, or a document of length L_max would wait for ever),
the carried pieces are those of this step only, and ages are bounded: a queue lets a piece through
that has waited ``max_age`` steps (rare on Generator A, where most wait less than 10).

Cost: O(P·log P + P·log N) for P pieces in N micro-batches; 0.6 ms for 300 pieces. Not for a cap
of C: without room above the window it can not add short documents beside long ones, and the
carried list grows until the epoch's drain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.dispatch import deal_groups, longest_first
from lightning_wlb.planning.packing.base import (
    Arrivals,
    Groups,
    Mesh,
    Packer,
    Rules,
    as_lists,
    as_pieces,
    check_fits,
)
from lightning_wlb.planning.packing.base import longest_first as by_length
from lightning_wlb.planning.release import overdue, release, thresholds_from_lengths


class WlbPacker(Packer):
    """Outlier queues before the greedy, longest-first dealing of micro-batches after it."""

    reads: ClassVar[tuple[str, ...]] = ("thresholds", "max_age")

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        if rules.thresholds is None:
            self._thresholds = thresholds_from_lengths(
                rules.lengths, rules.window, rules.queues, rules.work
            )
        else:
            self._thresholds = rules.thresholds
        self._queues: list[list[Piece]] = [[] for _ in self._thresholds]

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Least tokens of a piece of each outlier queue."""
        return self._thresholds

    @property
    def held(self) -> list[Piece]:
        """Carried pieces, then those of the queues."""
        return [*self.carried, *(piece for queue in self._queues for piece in queue)]

    def reset(self) -> None:
        """Start an epoch with empty queues."""
        super().reset()
        self._queues = [[] for _ in self._thresholds]

    def empty(self) -> list[Piece]:
        """Give up the queues and what was carried."""
        held = self.held
        self.reset()
        return held

    def admit(self, batch: list[Piece], arrivals: Arrivals, step: int) -> list[Piece]:
        """What the queues let through."""
        released, queues = release(batch, self._queues, self._thresholds, self.rules.micro_batches)
        late, self._queues = overdue(queues, step - self.rules.max_age)
        return released + late

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """Algorithm 1, lines 16-28."""
        return pack(pieces, bins, self.rules.cap, self.rules.work)

    def arrange(self, groups: Groups, mesh: Mesh) -> list[Groups]:
        """Whole micro-batches, by descending work, to the replica with the least so far."""
        return deal_groups(groups, mesh.replicas, self.rules.work, longest_first)

    def state_dict(self) -> dict[str, Any]:
        """Carried pieces and queues."""
        return {**super().state_dict(), "queues": [as_lists(queue) for queue in self._queues]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self._queues = [as_pieces(queue) for queue in state["queues"]]


def pack(
    pieces: Sequence[Piece], bins: int, cap: int, work: Callable[[int], int]
) -> tuple[list[list[Piece]], list[Piece]]:
    """Deal pieces to micro-batches of nearly equal work.

    Args:
        pieces: what may enter the step.
        bins: number of micro-batches, N.
        cap: most tokens of a micro-batch, L_max.
        work: cost of a piece from its tokens, an integer.

    Returns:
        ``bins`` groups, each with its pieces in the order in which they were added (some may be
        empty), and the pieces that did not fit. Equal lengths go by (document, origin), equal
        bins by number.

    Raises:
        ValueError: a piece is longer than ``cap``.
    """
    check_fits(pieces, cap)
    order = by_length(pieces)
    groups: list[list[Piece]] = [[] for _ in range(bins)]
    carried: list[Piece] = []
    loads = [0] * bins
    tokens = [0] * bins
    # A heap entry is stale once its bin has grown; it is dropped when it comes to the top.
    by_load = [(0, index) for index in range(bins)]
    by_tokens = [(0, index) for index in range(bins)]
    for piece in order:
        while by_load[0][0] != loads[by_load[0][1]]:
            heapq.heappop(by_load)
        while by_tokens[0][0] != tokens[by_tokens[0][1]]:
            heapq.heappop(by_tokens)
        length = piece.tokens
        chosen = by_load[0][1]
        if tokens[chosen] + length > cap:
            chosen = by_tokens[0][1]
            if tokens[chosen] + length > cap:
                carried.append(piece)
                continue
        groups[chosen].append(piece)
        loads[chosen] += work(length)
        tokens[chosen] += length
        heapq.heappush(by_load, (loads[chosen], chosen))
        heapq.heappush(by_tokens, (tokens[chosen], chosen))
    return groups, carried
