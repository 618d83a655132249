"""Costs of pieces as small integers, looked up instead of computed.

Planning asks for the cost of the same lengths again and again, thousands of times a step. Each
length is asked of the cost model once. Costs are scaled down to 41 bits for a piece of a whole
context window, so that the sum of a million of them is still an exact 64-bit integer, whatever
the model; a unit is less than 1e-12 of that piece's cost, and decisions do not depend on it.

Cost: one look-up in a dictionary, or one gather for an array of lengths. The table holds 8 bytes
for each length up to the context window, once arrays are asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_BITS = 41


class PieceCosts:
    """Scaled costs of whole pieces by their tokens.

    Args:
        work: forward and backward cost, an integer that grows with tokens.
        window: C, tokens of the longest piece.
        forward: cost of the forward alone; None: a third of ``work``, as for matrix products.
    """

    def __init__(
        self, work: Callable[[int], int], window: int, forward: Callable[[int], int] | None = None
    ) -> None:
        self._work, self._window = work, window
        self._forward = forward or (lambda tokens: work(tokens) // 3)
        self._shift = max(work(window).bit_length() - _BITS, 0)
        self._totals: dict[int, int] = {}
        self._forwards: dict[int, int] = {}
        self._table: NDArray[np.int64] | None = None

    def total(self, tokens: int) -> int:
        """Forward and backward cost of a piece, at least 1."""
        cost = self._totals.get(tokens)
        if cost is None:
            cost = self._totals[tokens] = max(self._work(tokens) >> self._shift, 1)
        return cost

    def forward(self, tokens: int) -> int:
        """Forward cost of a piece, less than :meth:`total` but for costs of 0 and 1."""
        cost = self._forwards.get(tokens)
        if cost is None:
            cost = self._forwards[tokens] = self._forward(tokens) >> self._shift
        return cost

    def totals(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """:meth:`total` of each of an array of lengths."""
        if self._table is None:
            self._table = np.zeros(self._window + 1, np.int64)
        costs = self._table[tokens]
        if not costs.all():
            for length in np.unique(tokens[costs == 0]).tolist():
                self._table[length] = self.total(length)
            costs = self._table[tokens]
        return costs
