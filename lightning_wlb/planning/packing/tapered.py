"""Balanced release, and micro-batches that are unlike on purpose: no slices, a cap of C.

Which pieces enter a step: all short ones, and the long ones but for the longest few, which wait
until it pays to run them together, under a budget of mean delay
(:mod:`~lightning_wlb.planning.holding`). Where they run: pieces are dealt to replicas by predicted
time (:mod:`~lightning_wlb.planning.dispatch`), and each replica's micro-batches grow to the
heaviest and shrink after it, as many as the pipeline gains by
(:mod:`~lightning_wlb.planning.taper`).

The number of micro-batches is free, up to 2·N (or two for each stage, if that is more), so no
micro-batch is longer than a context window, and nothing but the age bound forces a piece into a
step. On Generator A with four stages and N = 4 a simulated step takes 1.41 times its work at a mean
delay of 0.25 steps, where ``wlb`` takes 1.76 at 0.5 (``benchmarks/results/packing.md``).

The price: steps differ in tokens, by a third at that budget and less at a smaller one, and the
longest documents come in bunches. ``delay_budget=0`` gives constant tokens and 1.71. Not for a
pipeline of one stage and one replica, which has nothing to gain.

Cost: 3 ms a step of 250 pieces for one replica, of which the release is 0.1 ms.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from lightning_wlb.plan import Piece
from lightning_wlb.planning import holding
from lightning_wlb.planning.dispatch import deal_by_time, redeal
from lightning_wlb.planning.packing.base import (
    Arrivals,
    Groups,
    Mesh,
    Packer,
    Rules,
    as_lists,
    as_pieces,
    longest_first,
)
from lightning_wlb.planning.release import oldest_first
from lightning_wlb.planning.taper import Job, taper

_ROUNDS = 2  # in which cheap pieces move between replicas


class _Replica(NamedTuple):
    time: int
    groups: Groups


class TaperedPacker(Packer):
    """Holds the longest pieces under a delay budget, and tapers the micro-batches of a replica."""

    cap_percent: ClassVar[int] = 100
    reads: ClassVar[tuple[str, ...]] = (
        "delay_budget", "max_age", "nominal_replicas", "nominal_stages",
    )  # fmt: skip

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._long = rules.window // holding.LONG
        self._budget = int(rules.delay_budget * rules.nominal_tokens)
        self._least_tokens = rules.nominal_tokens * holding.LEAST_TOKENS // 100
        self._waiting: list[Piece] = []  # longest first
        # Where the budget's controller begins: what pays depends on the pieces of a replica.
        self._price = 2 * holding.UNIT * rules.nominal_replicas // rules.micro_batches

    @property
    def held(self) -> list[Piece]:
        """Carried pieces, then those that wait."""
        return self.carried + self._waiting

    def reset(self) -> None:
        """Start an epoch, in which nothing waits; the price of waiting stays."""
        super().reset()
        self._waiting = []

    def empty(self) -> list[Piece]:
        """Give up what waits and what was carried."""
        held = self.held
        self.reset()
        return held

    def admit(self, batch: list[Piece], arrivals: Arrivals, step: int) -> list[Piece]:
        """All pieces but the longest few."""
        if not self._budget:
            return batch
        rules, total = self.rules, self.rules.costs.total
        short = [piece for piece in batch if piece.tokens <= self._long]
        # Long pieces that did not fit the last step are held or not like any other.
        candidates = self._waiting + self.carried + batch
        long = longest_first([piece for piece in candidates if piece.tokens > self._long])
        self.carried = [piece for piece in self.carried if piece.tokens <= self._long]
        entering = short + self.carried
        number = holding.hold(
            holding.Waiting(
                [piece.tokens for piece in long],
                [total(piece.tokens) for piece in long],
                [step - piece.arrival >= rules.max_age for piece in long],
            ),
            holding.Others(
                sum(piece.tokens for piece in entering),
                sum(total(piece.tokens) for piece in entering),
            ),
            rules.nominal_replicas,
            rules.nominal_stages,
            self._price,
            self._least_tokens,
        )
        self._waiting = long[:number]
        held = sum(piece.tokens for piece in self._waiting)
        self._price = holding.next_price(self._price, held, self._budget, rules.nominal_tokens)
        return short + long[number:]

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """The oldest pieces of at most 2·N·C tokens, as one group: the mesh will divide them."""
        admitted, carried = oldest_first(pieces, 2 * self.rules.nominal_tokens)
        return [admitted], carried

    def arrange(self, groups: Groups, mesh: Mesh) -> list[Groups]:
        """Pieces dealt to replicas by time, and the tapered micro-batches of each."""
        total = self.rules.costs.total
        pieces = [piece for group in groups for piece in group]
        pieces.sort(key=lambda piece: (-total(piece.tokens), piece))
        costs = [total(piece.tokens) for piece in pieces]
        dealt = deal_by_time(costs, mesh.replicas, mesh.stages)
        tapered = [self._taper([pieces[index] for index in own], mesh) for own in dealt]
        for _ in range(_ROUNDS if mesh.replicas > 1 and mesh.stages > 1 else 0):
            dealt = redeal(costs, dealt, [replica.time for replica in tapered])
            again = [self._taper([pieces[index] for index in own], mesh) for own in dealt]
            if max(each.time for each in again) < max(each.time for each in tapered):
                tapered = again
        return [replica.groups for replica in tapered]

    def _taper(self, pieces: list[Piece], mesh: Mesh) -> _Replica:
        rules, costs = self.rules, self.rules.costs
        nominal = -(-rules.micro_batches // mesh.replicas)
        most = max(2 * nominal, 2 * mesh.stages)
        job = Job(
            [piece.tokens for piece in pieces],
            [costs.forward(piece.tokens) for piece in pieces],
            [costs.total(piece.tokens) for piece in pieces],
        )
        order, time = taper(job, nominal, most, rules.cap, mesh.stages)
        return _Replica(time, [[pieces[index] for index in group] for group in order])

    def state_dict(self) -> dict[str, Any]:
        """Carried and waiting pieces, and the price of waiting."""
        return {
            **super().state_dict(),
            "waiting": as_lists(self._waiting),
            "price": self._price,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self._waiting = as_pieces(state["waiting"])
        self._price = state["price"]
