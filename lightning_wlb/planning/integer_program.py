"""Packing pieces into bins of equal weight as an integer program, solved by CBC through PuLP.

Binary x_ij puts piece i into bin j; the largest weight of a bin is minimised under a bound on its
tokens (WLB-LLM Equations 1 and 2, Hydraulis Equation 1). CBC gets one thread and a limit on
branch-and-bound nodes, never on time, so that every rank finds the same answer.

Cost: seconds for some hundred variables, minutes for thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NODES = 100
"""Most branch-and-bound nodes of a solve."""


@dataclass(frozen=True)
class Problem:
    """Pieces to put into equal bins.

    Args:
        weights: weight of each piece, at least 0; bins are to have equal weights.
        sizes: tokens of each piece.
        bins: number of bins.
        limit: most tokens of a bin.
    """

    weights: Sequence[int]
    sizes: Sequence[int]
    bins: int
    limit: int

    @property
    def bound(self) -> int:
        """A lower bound of the heaviest bin's weight in any packing.

        One bin has at least k + 1 of the k·bins + 1 heaviest pieces.
        """
        order, bins = sorted(self.weights, reverse=True), self.bins
        crowded = (sum(order[k * bins - k : k * bins + 1]) for k in range(-(-len(order) // bins)))
        return max(-(-sum(order) // bins), *crowded, 0)


def solve(problem: Problem, start: Sequence[int] | None = None) -> list[int] | None:
    """The bin of each item in the best packing that CBC finds; None if it finds none.

    Args:
        problem: what to pack.
        start: the bin of each item in a known packing; None: there is none.
    """
    import pulp  # 0.1 s that only the packings which solve should pay

    items, bins = range(len(problem.weights)), range(problem.bins)
    # Weights near 1: solvers work in floating point with absolute tolerances.
    unit = max(sum(problem.weights) / problem.bins, 1.0)
    model = pulp.LpProblem("packing", pulp.LpMinimize)
    heaviest = pulp.LpVariable("heaviest", lowBound=problem.bound / unit)
    chosen = [[pulp.LpVariable(f"x_{i}_{j}", cat=pulp.LpBinary) for j in bins] for i in items]
    model += heaviest
    for i in items:
        model += pulp.lpSum(chosen[i]) == 1
    for j in bins:
        model += pulp.lpSum(chosen[i][j] * (problem.weights[i] / unit) for i in items) <= heaviest
        model += pulp.lpSum(chosen[i][j] * problem.sizes[i] for i in items) <= problem.limit
    if start is not None:
        for i in items:
            for j in bins:
                chosen[i][j].setInitialValue(int(start[i] == j))
        heaviest.setInitialValue(heaviest_of(problem, start) / unit)
    warm = start is not None
    model.solve(pulp.PULP_CBC_CMD(msg=False, threads=1, maxNodes=NODES, warmStart=warm))
    answer = []
    for i in items:
        # A solution may be integral up to a tolerance only; anything else is no solution.
        values = [variable.value() or 0.0 for variable in chosen[i]]
        if abs(max(values) - 1) > 1e-4 or abs(sum(values) - 1) > 1e-4:
            return None
        answer.append(values.index(max(values)))
    fits = _largest_sum(problem.sizes, answer, problem.bins) <= problem.limit
    return answer if fits else None


def heaviest_of(problem: Problem, answer: Sequence[int]) -> int:
    """Weight of the heaviest bin of a packing."""
    return _largest_sum(problem.weights, answer, problem.bins)


def _largest_sum(values: Sequence[int], answer: Sequence[int], bins: int) -> int:
    sums = [0] * bins
    for value, index in zip(values, answer, strict=True):
        sums[index] += value
    return max(sums)
