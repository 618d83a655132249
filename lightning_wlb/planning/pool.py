"""A few strategies, of which each step takes the one that is simulated to be fastest.

The mesh's own pipelines are always among them: a step leaves them only where another strategy is
simulated to be faster by :data:`WORTH_PER_MILLE`, or fits in memory where they do not. So no step
is predicted to take longer than it would on the mesh. Which pieces are in a step does not depend on
the strategy.

Cost: for each strategy that of :func:`~lightning_wlb.planning.unequal.arrange`, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_wlb.plan import Piece, Scheme
from lightning_wlb.planning.judge import Verdict
from lightning_wlb.planning.packing.base import Packer, Rules
from lightning_wlb.planning.unequal import Arranged, Receiver, Shape, arrange

WORTH_PER_MILLE = 5
"""Simulated gain for which a step leaves the mesh."""


class Elected(NamedTuple):
    """The strategy of a step, and its pipelines' plans."""

    strategy: tuple[Scheme, ...]
    arranged: Arranged


@dataclass(frozen=True, eq=False)
class Pool:
    """Strategies to choose from, beside the mesh's own.

    Args:
        strategies: of each its pipelines, on consecutive ranks.
        kinds: what a pipeline of each shape can do.

    Raises:
        ValueError: there is no strategy, or a pipeline of a shape that is not among the kinds.
    """

    strategies: tuple[tuple[Scheme, ...], ...]
    kinds: Mapping[Shape, Receiver]

    def __post_init__(self) -> None:
        if not self.strategies or not all(self.strategies):
            raise ValueError("a pool without a strategy, or one without a pipeline. Give some.")
        for scheme in (scheme for strategy in self.strategies for scheme in strategy):
            if scheme.shape not in self.kinds:
                raise ValueError(f"a pool without a predictor for the pipeline on {scheme}.")

    def elect(
        self,
        pieces: Sequence[Piece],
        rules: Rules,
        packer: Callable[[Rules], Packer],
        on_mesh: Verdict,
        limit: int,
    ) -> Elected | None:
        """The strategy of a step; None for the mesh's own.

        Args:
            pieces: of the step.
            rules: of the run.
            packer: makes the run's packing.
            on_mesh: the step on the mesh.
            limit: bytes of a device that may be filled.
        """
        best: Elected | None = None
        least = max(on_mesh.peak - limit, 0), on_mesh.time * (1000 - WORTH_PER_MILLE) // 1000
        longest = max(piece.tokens for piece in pieces)
        for strategy in self.strategies:
            if max(self.kinds[scheme.shape].longest for scheme in strategy) < longest:
                continue
            arranged = arrange(pieces, strategy, self.kinds, rules, packer)
            if arranged[:2] < least:
                least, best = arranged[:2], Elected(strategy, arranged)
        return best
