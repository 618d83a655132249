"""Packing as an integer linear program, through PuLP: WLB-LLM Equations 1 and 2.

Binary x_ij puts piece i into micro-batch j; the largest weight of a micro-batch is minimised under
a bound on its tokens. CBC gets a limit on branch-and-bound nodes and one thread, never a limit on
time, so that every rank of a run, and the run that resumes it, get the same answer. It starts from
a known packing, and a greedy answer stands where it finds nothing better. Both methods pack W
global batches together, as ``fixed_greedy`` does.

* ``fixed_ilp`` (Equation 1, "Fixed-Len Solver") minimises the attention work, the sum of d², of the
  heaviest micro-batch of C tokens. Every micro-batch is exactly full, so whole pieces fit only in
  few ways; the stream's own cuts are one, from which the solver starts. The greedy answer is that
  of ``fixed_greedy``, which may cut pieces.
* ``varlen_ilp`` (Equation 2) minimises the work, forward and backward, of the heaviest micro-batch
  under the token cap. It starts from the greedy answer, that of ``wlb`` without queues, which also
  stands where pieces do not all fit and some have to be carried.

The optimum is hard to prove, so the gap is reported against a bound: the mean weight of a
micro-batch, and what the heaviest pieces weigh where they must share micro-batches.

Cost: seconds to minutes for a window of a few global batches. Not for training: it shows how far
the greedy methods are from the optimum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from lightning_wlb.argument_checks import whole
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dealing import deal_capped
from lightning_wlb.planning.integer_program import Problem, heaviest_of, solve
from lightning_wlb.planning.packing.base import MicroBatches, PackingOptions, Rules, check_fits
from lightning_wlb.planning.packing.baselines import WindowedOptions, WindowedPacker, pack_greedily

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IlpOptions(WindowedOptions):
    """Options of ``fixed_ilp`` and ``varlen_ilp``.

    Args:
        packing_window: W, global batches that are packed together.
        max_age: steps after which a carried piece opens further micro-batches rather than wait.
    """

    decide_data: ClassVar[tuple[str, ...]] = ("packing_window", "max_age")

    max_age: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "max_age", whole("max_age", self.max_age, 1))


class _IlpPacker(WindowedPacker):
    Options: ClassVar[type[PackingOptions]] = IlpOptions

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.max_age = rules.options.max_age

    def _solved(
        self,
        pieces: list[Piece],
        weight: Callable[[int], int],
        limit: int,
        start: list[int],
        greedy: MicroBatches,
    ) -> MicroBatches:
        """The solver's packing if its heaviest micro-batch is lighter than that of ``greedy``.

        Args:
            pieces: what to pack.
            weight: what a piece weighs, from its tokens.
            limit: most tokens of a micro-batch.
            start: the micro-batch of each piece in the packing that the solver starts from.
            greedy: the greedy packing.
        """
        lengths = [piece.tokens for piece in pieces]
        problem = Problem(list(map(weight, lengths)), lengths, len(greedy), limit)
        heaviest = max(sum(weight(piece.tokens) for piece in packed) for packed in greedy)
        answer = solve(problem, start)
        found = None if answer is None else heaviest_of(problem, answer)
        report(type(self).__name__, problem, found, heaviest)
        if answer is None or found is None or found >= heaviest:
            return greedy
        micro_batches: MicroBatches = [[] for _ in greedy]
        for piece, index in zip(pieces, answer, strict=True):
            micro_batches[index].append(piece)
        return micro_batches


class FixedIlpPacker(_IlpPacker):
    """Equation 1 over the windows of W global batches."""

    cuts_stream: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """Micro-batches of at most C tokens; nothing is carried."""
        window = self.rules.window
        greedy = pack_greedily(pieces, bins, window)
        start, taken = [], 0
        for piece in pieces:
            start.append(taken // window)
            taken += piece.tokens
        return self._solved(pieces, lambda tokens: tokens**2, window, start, greedy), []


class VarlenIlpPacker(_IlpPacker):
    """Equation 2 over the windows of W global batches."""

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """Micro-batches of at most the cap; what the greedy answer carries is carried."""
        cap, work = self.rules.cap, self.rules.work.total
        check_fits(pieces, cap)
        greedy, carried = deal_capped(pieces, bins, cap, work)
        if carried:
            return greedy, carried
        place = {piece: index for index, packed in enumerate(greedy) for piece in packed}
        return self._solved(pieces, work, cap, [place[piece] for piece in pieces], greedy), []


def report(method: str, problem: Problem, found: int | None, greedy: int) -> None:
    """Log what the solver found, the greedy answer, and the gap to the bound."""
    best = greedy if found is None else min(found, greedy)
    log.info(
        "%s: %d pieces in %d micro-batches, %s; at most %.2f %% above the optimum.",
        method,
        len(problem.weights),
        problem.bins,
        "the solver found nothing, the greedy answer stands"
        if found is None
        else f"the solver's heaviest is {found / greedy:.4f} of the greedy answer's",
        100 * (best / max(problem.bound, 1) - 1),
    )
