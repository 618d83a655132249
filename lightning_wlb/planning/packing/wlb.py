"""WLB-LLM's variable-length packing by work, with multi-level outlier queues (§4.2, Algorithm 1).

A piece with more work than short documents can match makes its micro-batch too heavy, unless each
other micro-batch gets a similar piece. So pieces of at least L_1 tokens wait: queue i holds those
with L_i <= tokens < L_{i+1}, first in, first out, and when it has N pieces, one for each
micro-batch, the N oldest enter the step together (lines 3-15). They and the shorter pieces are
packed by work under the cap (:func:`~lightning_wlb.planning.dealing.deal_capped`, lines 16-28);
pieces that do not fit are carried to the next step. At the end of an epoch the waiting pieces are
drained, oldest first. More queues hold pieces of more equal work, but for longer.

Departures from the listing as printed (docs/design.md, "Where we left the papers"): a piece may
fill a micro-batch exactly; only pieces left over in this step are carried; and a queue lets through
a piece that has waited ``max_age`` steps, which is rare.

Cost: O(queues + P·log P + P·log N) a step for P pieces in N micro-batches, below a millisecond. Do
not use it for documents of similar lengths, nor for runs of a few steps, in which queues hardly
fill, nor with a cap of C: without room above the window it cannot put short documents beside long
ones, and the carried list grows until the epoch's drain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.argument_checks import whole
from lightning_wlb.plan import Piece, piece_counts
from lightning_wlb.planning.dealing import deal_capped
from lightning_wlb.planning.packing.base import MicroBatches, Packer, PackingOptions, Rules


@dataclass(frozen=True)
class WlbOptions(PackingOptions):
    """Options of ``wlb``.

    Args:
        queues: number of outlier queues, with thresholds from the length distribution; 0: no delay.
        max_age: steps after which a piece waits no longer, unless the step would then need more
            than 2·N micro-batches (which takes one document of many global batches).
    """

    # The queues are in the fingerprint as thresholds.
    decide_data: ClassVar[tuple[str, ...]] = ("max_age",)

    queues: int = 2
    max_age: int = 12

    def __post_init__(self) -> None:
        object.__setattr__(self, "queues", whole("queues", self.queues, 0))
        object.__setattr__(self, "max_age", whole("max_age", self.max_age, 1))


class WlbPacker(Packer):
    """Outlier queues, then the greedy packing, then heaviest-first dealing of micro-batches."""

    Options: ClassVar[type[PackingOptions]] = WlbOptions
    cap_percent: ClassVar[int] = 150

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        options: WlbOptions = rules.options
        self.max_age = options.max_age
        self.thresholds = thresholds_from_lengths(
            rules.lengths, rules.window, options.queues, rules.work.total
        )
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
        latest = step - self.max_age
        late = [piece for queue in queues for piece in queue if piece.arrival <= latest]
        self._queues = [[piece for piece in queue if piece.arrival > latest] for queue in queues]
        return released + late

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """Algorithm 1, lines 16-28."""
        return deal_capped(pieces, bins, self.rules.cap, self.rules.work.total)

    def state_dict(self) -> dict[str, Any]:
        """Carried pieces and queues."""
        queues = [list(map(list, queue)) for queue in self._queues]
        return {**super().state_dict(), "queues": queues}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        queues = zip(state["queues"], self.thresholds, strict=True)
        self._queues = [list(map(Piece._make, queue)) for queue, _ in queues]


def thresholds_from_lengths(
    lengths: NDArray[np.int64], window: int, queues: int, work: Callable[[int], int]
) -> tuple[int, ...]:
    """Thresholds L_1 < ... < L_n for the pieces of a document store.

    The fair share of a micro-batch is the work of C tokens of average documents. A piece with more
    work cannot be balanced within its step, however short its neighbours are; a piece with 1/n of
    the share still needs n - 1 like it. So L_1 is the length whose work is 1/n of the fair share.
    In experiments this balanced about as well as the best other L_1, with less delay. The spacing
    of thresholds mattered less, so they are spaced evenly in tokens from L_1 to C.

    Args:
        lengths: tokens of each document of the store; longer ones count as pieces of C.
        window: C, the longest piece.
        queues: n; 0 for no delay.
        work: cost of a piece from its tokens, an integer that grows with them.

    Returns:
        At most n thresholds (fewer if there are fewer than n lengths from L_1 to C).
    """
    if queues == 0:
        return ()
    total = sum(count * work(tokens) for tokens, count in piece_counts(lengths, window).items())
    tokens = int(lengths.sum())
    # work(L_1) >= window · (total / tokens) / queues, in integers.
    first = 1 + bisect_left(
        range(1, window + 1), window * total, key=lambda length: work(length) * tokens * queues
    )
    first = min(first, window)
    spaced = (first + (window - first) * index // queues for index in range(queues))
    return tuple(sorted(set(spaced)))


def release(
    arrivals: Sequence[Piece],
    queues: Sequence[Sequence[Piece]],
    thresholds: Sequence[int],
    count: int,
) -> tuple[list[Piece], list[list[Piece]]]:
    """Let a global batch arrive, and release what may enter the step.

    Args:
        arrivals: pieces of the global batch, in order of arrival.
        queues: waiting pieces of each queue, oldest first; not changed.
        thresholds: L_i, the least tokens of a piece of queue i; as many as queues.
        count: N; a queue with at least N pieces releases its N oldest.

    Returns:
        The released pieces, and the queues that remain. A queue releases once per call.
    """
    held = [list(queue) for queue in queues]
    released = []
    for piece in arrivals:
        level = bisect_right(thresholds, piece.tokens)
        if level:
            held[level - 1].append(piece)
        else:
            released.append(piece)
    for queue in held:
        if len(queue) >= count:
            released.extend(queue[:count])
            del queue[:count]
    return released, held
