"""Balanced release, and N micro-batches of equal work: WLB-LLM's packing without thresholds.

Where the queues of ``wlb`` hold every long piece until N alike have come, this method asks each
step which long pieces are better kept back (:mod:`~lightning_wlb.planning.subset`), under a budget
of mean delay. The pieces that enter are packed longest-first by forward and backward work, under
the token cap, as in ``wlb``.

At the same imbalance it delays half as much: max·N/Σ of 1.018 at a mean delay of 0.25 steps on
Generator A (N = 4, cap 1.5·C), where two queues have 1.018 at 0.53. It is the choice where a step
must have N micro-batches of equal cost. Where their number and order are free, ``tapered`` takes
less time, at a lower cap. Like ``tapered`` it lets the tokens of a step vary.

With more than eight micro-batches one piece matters little, and the longest wait
(:mod:`~lightning_wlb.planning.holding`): on 16 that is as even as the search, in a tenth of the
time.

Cost: 3 ms a step of 250 pieces in plain Python; see :mod:`~lightning_wlb.planning.subset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lightning_wlb.plan import Piece
from lightning_wlb.planning import holding
from lightning_wlb.planning.costs import PieceCosts
from lightning_wlb.planning.dispatch import deal_groups
from lightning_wlb.planning.dispatch import longest_first as deal_longest_first
from lightning_wlb.planning.many import deal_many
from lightning_wlb.planning.packing.base import (
    Arrivals,
    Groups,
    Mesh,
    Packer,
    Rules,
    as_lists,
    as_pieces,
    check_fits,
    longest_first,
)
from lightning_wlb.planning.subset import AHEAD, Batch, Bins, hold_subset

FEW = 8  # micro-batches for which subsets are searched; above, the longest pieces wait


class BalancedPacker(Packer):
    """Holds the subset of long pieces that leaves N micro-batches of equal work."""

    reads: ClassVar[tuple[str, ...]] = ("delay_budget", "max_age")

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._long = rules.window // holding.LONG
        self._budget = int(rules.delay_budget * rules.nominal_tokens)
        self._waiting: list[Piece] = []  # longest first
        # Where the budget's controller begins: waiting is worth more, the less room there is
        # beside long pieces (found on Generator A, N = 4, caps of 1.25 to 2·C).
        room = max(rules.cap - rules.window, rules.window // 8, 1)
        start = holding.UNIT * rules.window**2 // (5 * rules.micro_batches * room**2)
        self._price = max(start, 1) if rules.micro_batches <= FEW else holding.UNIT // 4
        self._work = 0  # of the steps of the epoch, and their number: what a share is
        self._steps = 0

    @property
    def held(self) -> list[Piece]:
        """Carried pieces, then those that wait."""
        return self.carried + self._waiting

    def reset(self) -> None:
        """Start an epoch, in which nothing waits; the price of waiting stays."""
        super().reset()
        self._waiting = []
        self._work = self._steps = 0

    def empty(self) -> list[Piece]:
        """Give up what waits and what was carried."""
        held = self.held
        self.carried, self._waiting = [], []
        return held

    def admit(self, batch: list[Piece], arrivals: Arrivals, step: int) -> list[Piece]:
        """All pieces but those that would unbalance the step."""
        if not self._budget:
            return batch
        rules, total = self.rules, self.rules.costs.total
        late = sum(piece.tokens for piece in self.carried)  # they have waited a step, too
        short = [piece for piece in batch if piece.tokens <= self._long]
        # Long pieces that did not fit the last step are held or not like any other.
        candidates = self._waiting + self.carried + batch
        long = longest_first([piece for piece in candidates if piece.tokens > self._long])
        self.carried = [piece for piece in self.carried if piece.tokens <= self._long]
        self._work += sum(total(piece.tokens) for piece in batch)
        self._steps += 1
        entering = short + self.carried
        waiting = holding.Waiting(
            [piece.tokens for piece in long],
            [total(piece.tokens) for piece in long],
            [step - piece.arrival >= rules.max_age for piece in long],
        )
        others = holding.Others(
            sum(piece.tokens for piece in entering),
            sum(total(piece.tokens) for piece in entering),
        )
        least = rules.nominal_tokens * holding.LEAST_TOKENS // 100
        if rules.micro_batches > FEW:
            number = holding.hold(waiting, others, rules.micro_batches, 1, self._price, least)
            held = [index < number for index in range(len(long))]
        else:
            held = hold_subset(
                waiting,
                others,
                [self._batch(tokens) for tokens in arrivals.peek(AHEAD)],
                Bins(
                    count=rules.micro_batches,
                    cap=rules.cap,
                    share=max(self._work // (self._steps * rules.micro_batches), 1),
                    least_tokens=least,
                    nominal=rules.nominal_tokens,
                    price=self._price,
                    window=rules.window,
                ),
            )
        self._waiting = [piece for piece, waits in zip(long, held, strict=True) if waits]
        tokens = late + sum(piece.tokens for piece in self._waiting)
        self._price = holding.next_price(self._price, tokens, self._budget, rules.nominal_tokens)
        return short + [piece for piece, waits in zip(long, held, strict=True) if not waits]

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """Longest first, each piece to the least work that has room."""
        return pack(pieces, bins, self.rules.cap, self.rules.costs)

    def arrange(self, groups: Groups, mesh: Mesh) -> list[Groups]:
        """Whole micro-batches, by descending work, to the replica with the least so far."""
        return deal_groups(groups, mesh.replicas, self.rules.work, deal_longest_first)

    def state_dict(self) -> dict[str, Any]:
        """Carried and waiting pieces, the price of waiting and the work seen."""
        return {
            **super().state_dict(),
            "waiting": as_lists(self._waiting),
            "price": self._price,
            "work": self._work,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self._waiting = as_pieces(state["waiting"])
        self._price = state["price"]
        self._work, self._steps = state["work"], state["steps"]

    def _batch(self, tokens: list[int]) -> Batch:
        total = self.rules.costs.total
        long = sorted((length for length in tokens if length > self._long), reverse=True)
        short = [length for length in tokens if length <= self._long]
        return Batch(
            long,
            [total(length) for length in long],
            holding.Others(sum(short), sum(total(length) for length in short)),
        )


def pack(
    pieces: Sequence[Piece], bins: int, cap: int, costs: PieceCosts
) -> tuple[Groups, list[Piece]]:
    """Deal pieces in descending length, each to the micro-batch of least work that has room.

    Args:
        pieces: what enters the step.
        bins: number of micro-batches, N.
        cap: most tokens of a micro-batch.
        costs: of a piece from its tokens.

    Returns:
        ``bins`` groups, and the pieces that fit none. Equal lengths go by (document, origin),
        equal micro-batches by number.

    Raises:
        ValueError: a piece is longer than ``cap``.
    """
    check_fits(pieces, cap)
    ordered = longest_first(pieces)
    tokens = np.array([piece.tokens for piece in ordered], np.int64)
    homes = deal_many(costs.totals(tokens), tokens, bins, cap).tolist()
    groups: Groups = [[] for _ in range(bins)]
    carried: list[Piece] = []
    for piece, home in zip(ordered, homes, strict=True):
        (groups[home] if home >= 0 else carried).append(piece)
    return groups, carried
