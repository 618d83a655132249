"""Variable-length packing by integer linear program: WLB-LLM Equation 2.

The work (attention and everything else, forward and backward) of the heaviest of the W·N
micro-batches is minimised under the token cap L_max. The solver starts from the greedy answer of
``wlb`` without queues, which stands where nothing better is found, or where pieces do not all fit
and some have to be carried.

Cost: see :mod:`~lightning_wlb.planning.packing.solver`. For comparison, not for training.
"""

from __future__ import annotations

from typing import ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing import wlb
from lightning_wlb.planning.packing.base import Groups, Rules
from lightning_wlb.planning.packing.solver import Problem, heaviest_of, report, require, solve
from lightning_wlb.planning.packing.windowed import WindowedPacker


class VarlenIlpPacker(WindowedPacker):
    """Equation 2 over the windows of W global batches.

    Raises:
        ModuleNotFoundError: the solver is not installed.
    """

    reads: ClassVar[tuple[str, ...]] = ("packing_window", "max_age", "solver", "solver_nodes")

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        require(rules.solver)

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """Micro-batches of at most the cap; carried is what the greedy answer carries."""
        greedy, carried = wlb.pack(pieces, bins, self.rules.cap, self.rules.work)
        if carried:
            return greedy, carried
        total = self.rules.costs.total
        heaviest = max(sum(total(piece.tokens) for piece in group) for group in greedy)
        home = {piece: index for index, group in enumerate(greedy) for piece in group}
        problem = Problem(
            [total(piece.tokens) for piece in pieces],
            [piece.tokens for piece in pieces],
            bins,
            self.rules.cap,
        )
        start = [home[piece] for piece in pieces]
        answer = solve(problem, self.rules.solver, self.rules.solver_nodes, start)
        found = None if answer is None else heaviest_of(problem, answer)
        report("varlen_ilp", problem, found, heaviest)
        if answer is None or found is None or found >= heaviest:
            return greedy, []
        groups: Groups = [[] for _ in range(bins)]
        for piece, index in zip(pieces, answer, strict=True):
            groups[index].append(piece)
        return groups, []
