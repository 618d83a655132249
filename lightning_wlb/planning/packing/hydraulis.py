"""Hydraulis' two-stage assignment (its §6) for pipelines that are all alike: deal, then pack.

First the pieces of a step are dealt to the replicas, by the paper's Algorithm 1
(:mod:`~lightning_wlb.planning.dealing`).

Then each replica's pieces are packed into V micro-batches so that the heaviest is as light as
possible (Equation 1), for the V with the least product of P - 1 + V and the heaviest
(:func:`pack_pipeline`). The cap bounds V from below; from above, micro-batches must be long enough
to use a device well (Appendix C).

Pieces stay whole, none waits, none is shared. Costs are exact work, spread evenly over the stages.
A piece uses a device well if its work is at least 85 % of the sum of that work and the overhead
that ``auto`` counts for two passes. The method serves comparisons: ``auto`` deals by work alone,
since slices leave a pipeline little to wait for (``benchmarks/results/two_stage.json``).

Cost: that of the dealing, and up to four solver calls for each replica, if these may be 1 % better
than the greedy packing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from typing import ClassVar

from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.dealing import deal_capped, deal_greedily, longest_first
from lightning_wlb.planning.integer_program import Problem, heaviest_of, solve
from lightning_wlb.planning.packing.base import MicroBatches, Packer
from lightning_wlb.planning.plan_scoring import Placement
from lightning_wlb.planning.replica_plans import replica_plan, whole
from lightning_wlb.planning.tuning import ACTION_OVERHEAD

UTILISED_PERCENT = 85  # of a device's efficiency, Appendix C
SOLVES = 4  # most calls of the solver for a pipeline
BINARIES = 2000  # more variables take a solver minutes, and greedy packings are near the bound
WORTH_PERCENT = 1  # the solver is asked where it may be faster by more than this


class HydraulisPacker(Packer):
    """Whole pieces, dealt by Algorithm 1 and packed by Equation 1, without delay."""

    arranges = True
    cap_percent = 100
    solves: ClassVar[int] = SOLVES
    """Most calls of the solver for a pipeline."""

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """All pieces in one list, because their micro-batches depend on the mesh."""
        return [pieces], []

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """Both stages of the assignment."""
        (pieces,) = micro_batches
        mesh, cap = place.mesh, self.cap(place)
        pieces = longest_first(pieces)

        def cost(tokens: int) -> int:
            return self.rules.work.total(tokens) // mesh.pipeline

        costs = [[cost(piece.tokens)] * mesh.data for piece in pieces]
        dealt = deal_greedily(costs, [mesh.pipeline] * mesh.data)
        plans = []
        for number, indices in enumerate(dealt):
            own = [pieces[index] for index in indices]
            packed = pack_pipeline(own, mesh.pipeline, cap, cost, self.utilised, self.solves)
            packs = [list(map(whole, each)) for each in packed]
            plans.append(replica_plan(packs, number, place.sharding))
        return plans

    @property
    def utilised(self) -> int:
        """UtilLen: least tokens of a piece that uses a device well, at most a window."""
        work, window = self.rules.work, self.rules.window
        overhead = 2 * work.forward(max(window // ACTION_OVERHEAD, 1))
        least = UTILISED_PERCENT * overhead // (100 - UTILISED_PERCENT)
        return min(bisect_left(range(window), least, key=work.total), window)


def pack_pipeline(
    pieces: Sequence[Piece],
    stages: int,
    cap: int,
    cost: Callable[[int], int],
    utilised: int = 1,
    solves: int = SOLVES,
) -> MicroBatches:
    """The best packing by Equation 1, over the numbers of micro-batches V that Appendix C allows.

    Each V is packed greedily. Then the solver is asked for those V with which a packing could be
    1 % faster than the best so far, in the order of their lower bounds.

    Args:
        pieces: the pieces of one pipeline, none longer than ``cap``.
        stages: depth of the pipeline.
        cap: most tokens of a micro-batch, MaxLen.
        cost: forward and backward cost of a piece on one stage, from its tokens.
        utilised: UtilLen, tokens of a micro-batch that uses a device well.
        solves: most calls of the solver.

    Returns:
        Micro-batches of whole pieces, none empty.
    """
    weights, sizes = [cost(piece.tokens) for piece in pieces], [piece.tokens for piece in pieces]
    fewest = max(-(-sum(sizes) // cap), 1)
    most = max(min(sum(sizes) // utilised, len(pieces)), fewest)
    best: MicroBatches = []
    least: float = inf
    promises = []
    for bins in range(fewest, len(pieces) + 1):
        if bins > most and best:
            break  # until then, as many more as it takes
        problem, passes = Problem(weights, sizes, bins, cap), stages - 1 + bins
        promises.append((problem.bound * passes, bins, problem))
        packed, left = deal_capped(pieces, bins, cap, cost)
        time = passes * max(sum(cost(piece.tokens) for piece in own) for own in packed)
        if not left and time < least:
            least, best = time, packed
    for promise, bins, problem in sorted(promises, key=lambda each: each[:2])[:solves]:
        if (100 + WORTH_PERCENT) * promise >= 100 * least or bins * len(pieces) > BINARIES:
            continue
        answer = solve(problem)
        if answer is None:
            continue
        time = (stages - 1 + bins) * heaviest_of(problem, answer)
        if time < least:
            least, best = time, [[] for _ in range(bins)]
            for piece, index in zip(pieces, answer, strict=True):
                best[index].append(piece)
    return [own for own in best if own]
