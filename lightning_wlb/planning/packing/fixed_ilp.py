"""Fixed-length packing by integer linear program: WLB-LLM Equation 1 ("Fixed-Len Solver").

The attention work Σ d² of the heaviest of the W·N micro-batches of C tokens is minimised. Every
micro-batch is exactly full, so whole pieces fit only in few ways; the stream's own cuts are one,
from which the solver starts. The answer of ``fixed_greedy``, which may cut pieces, stands where it
is better.

Cost: see :mod:`~lightning_wlb.planning.packing.solver`. For comparison, not for training.
"""

from __future__ import annotations

from typing import ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing import fixed_greedy
from lightning_wlb.planning.packing.base import Groups, Rules
from lightning_wlb.planning.packing.solver import Problem, heaviest_of, report, require, solve
from lightning_wlb.planning.packing.windowed import WindowedPacker


class FixedIlpPacker(WindowedPacker):
    """Equation 1 over the windows of W global batches.

    Raises:
        ModuleNotFoundError: the solver is not installed.
    """

    cuts_stream: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100
    reads: ClassVar[tuple[str, ...]] = ("packing_window", "max_age", "solver", "solver_nodes")

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        require(rules.solver)

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """Micro-batches of at most C tokens; nothing is carried."""
        window = self.rules.window
        greedy = fixed_greedy.pack(pieces, bins, window)
        heaviest = max(sum(piece.tokens**2 for piece in group) for group in greedy)
        problem = Problem(
            [piece.tokens**2 for piece in pieces], [piece.tokens for piece in pieces], bins, window
        )
        start, taken = [], 0
        for piece in pieces:
            start.append(taken // window)
            taken += piece.tokens
        answer = solve(problem, self.rules.solver, self.rules.solver_nodes, start)
        found = None if answer is None else heaviest_of(problem, answer)
        report("fixed_ilp", problem, found, heaviest)
        if answer is None or found is None or found >= heaviest:
            return greedy, []
        groups: Groups = [[] for _ in range(bins)]
        for piece, index in zip(pieces, answer, strict=True):
            groups[index].append(piece)
        return groups, []
