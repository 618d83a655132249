"""Hydraulis' two-stage assignment (its §6) for pipelines that are all alike: deal, then pack.

First the paper's Algorithm 1 deals pieces to replicas (:mod:`~lightning_wlb.planning.dealing`).

Then each replica's pieces are packed into V micro-batches so that the heaviest is as light as
possible (Equation 1). V minimises (P - 1 + V) times the cost of the heaviest micro-batch
(:func:`pack_pipeline`). The cap bounds V from below; the bound from above keeps micro-batches long
enough to use a device well (Appendix C). The packing is greedy: the paper's integer program made no
step shorter (docs/design.md, "What was tried and lost").

Pieces stay whole, none waits, none is shared. Costs are exact work, spread evenly over the stages.
A piece uses a device well if its work is at least 85 % of the sum of that work and the overhead
that ``auto`` counts for two passes. The method serves comparisons: ``auto`` deals by work alone,
since slices leave a pipeline little to wait for (``benchmarks/results/hydraulis_paper.md``).

Cost: the dealing, and a greedy packing for each V.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.dealing import deal_capped, deal_greedily, longest_first
from lightning_wlb.planning.packing.base import MicroBatches, Packer
from lightning_wlb.planning.plan_scoring import Placement
from lightning_wlb.planning.replica_plans import replica_plan, whole_slice
from lightning_wlb.planning.tuning import ACTION_OVERHEAD

UTILISED_PERCENT = 85  # of a device's efficiency, Appendix C


class HydraulisPacker(Packer):
    """Whole pieces, dealt by Algorithm 1 and packed by Equation 1, without delay."""

    arranges = True

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """Both stages of the assignment."""
        (pieces,) = micro_batches
        mesh, cap = place.mesh, self.cap(place)
        pieces = longest_first(pieces)
        work, window = self.rules.work, self.rules.window
        overhead = 2 * work.forward(max(window // ACTION_OVERHEAD, 1))
        least = UTILISED_PERCENT * overhead // (100 - UTILISED_PERCENT)
        utilised = min(bisect_left(range(window), least, key=work.total), window)

        def cost(tokens: int) -> int:
            return work.total(tokens) // mesh.pipeline

        costs = [[cost(piece.tokens)] * mesh.data for piece in pieces]
        dealt = deal_greedily(costs, [mesh.pipeline] * mesh.data)
        plans = []
        for number, indices in enumerate(dealt):
            own = [pieces[index] for index in indices]
            packed = pack_pipeline(own, mesh.pipeline, cap, cost, utilised)
            packs = [list(map(whole_slice, each)) for each in packed]
            plans.append(replica_plan(packs, number, place.sharding))
        return plans


def pack_pipeline(
    pieces: Sequence[Piece], stages: int, cap: int, cost: Callable[[int], int], utilised: int
) -> MicroBatches:
    """The best greedy packing by Equation 1, over the numbers of micro-batches V of Appendix C.

    Args:
        pieces: the pieces of one pipeline, none longer than ``cap``.
        stages: depth of the pipeline.
        cap: most tokens of a micro-batch, MaxLen.
        cost: forward and backward cost of a piece on one stage, from its tokens.
        utilised: UtilLen, least tokens of a micro-batch that uses a device well.

    Returns:
        Micro-batches of whole pieces, none empty.
    """
    tokens = sum(piece.tokens for piece in pieces)
    fewest = max(-(-tokens // cap), 1)
    most = max(min(tokens // utilised, len(pieces)), fewest)
    best: MicroBatches = []
    least: float = inf
    for bins in range(fewest, len(pieces) + 1):
        if bins > most and best:
            break  # without any packing yet, further numbers are tried
        packed, left = deal_capped(pieces, bins, cap, cost)
        heaviest = max(sum(cost(piece.tokens) for piece in own) for own in packed)
        time = (stages - 1 + bins) * heaviest
        if not left and time < least:
            least, best = time, packed
    return [own for own in best if own]
