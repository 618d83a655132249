"""Hydraulis' two-stage assignment (its §6) for pipelines that are all alike: deal, then pack.

First the pieces of a step are dealt to the replicas. What a pipeline takes is not known before its
pieces are packed, but with equal micro-batches it is not below their cost and P - 1 times the
costliest of them (Equation 2). Equation 3 deals so that the largest bound is least; it is an
integer program, here :func:`deal_exactly`. The method takes the paper's Algorithm 1,
:func:`deal_greedily`: pieces go one by one in random order, each where the largest bound grows
least, and the best of 100 trials stays.

Then each replica's pieces are packed into V micro-batches so that the heaviest is as light as it
can be (Equation 1), for the V for which the heaviest times P - 1 + V is least
(:func:`pack_pipeline`). V goes from what the cap allows to what keeps micro-batches long enough for
a device (Appendix C).

Pieces stay whole, none waits, none is shared. Costs are exact work, spread evenly over the stages.
A piece is long enough for a device if its work is 85 % of itself and the overhead that ``auto``
counts for its two passes. It is here to compare with: ``auto`` deals by work alone, since slices
leave a pipeline little to wait for (``benchmarks/results/two_stage.json``).

Cost: O(trials · P · R) for P pieces and R replicas in compiled loops, and up to four
solver calls for each replica, where one may be 1 % better than the greedy packing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import pulp

from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.longest_first import deal_capped, longest_first
from lightning_wlb.planning.packing.auto import OVERHEAD
from lightning_wlb.planning.packing.base import MicroBatches, Packer, Placement
from lightning_wlb.planning.packing.ilp import Problem, heaviest_of, solve
from lightning_wlb.planning.replicas import replica_plan, whole

TRIALS = 100  # of the paper's experiments
UTILISED_PERCENT = 85  # of a device's efficiency, Appendix C
NODES = 100
SOLVES = 4  # most calls of the solver for a pipeline
BINARIES = 2000  # more variables than these take a solver minutes, and greed is near the bound
WORTH_PERCENT = 1


class HydraulisPacker(Packer):
    """Whole pieces, dealt by Algorithm 1 and packed by Equation 1, without delay."""

    cap_percent = 100

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """All pieces in one: which micro-batches there are depends on the mesh."""
        return [pieces], []

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """Both stages of the assignment."""
        (pieces,) = micro_batches
        mesh, cap = place.mesh, self.rules.cap
        pieces = longest_first(pieces)

        def cost(tokens: int) -> int:
            return self.rules.work.total(tokens) // mesh.pipeline

        dealt = deal_greedily([cost(piece.tokens) for piece in pieces], mesh.data, mesh.pipeline)
        return [
            replica_plan(
                [
                    list(map(whole, packed))
                    for packed in pack_pipeline(
                        [pieces[index] for index in own], mesh.pipeline, cap, cost, self.utilised
                    )
                ],
                number,
                place.shard,
            )
            for number, own in enumerate(dealt)
        ]

    @property
    def utilised(self) -> int:
        """UtilLen: least tokens of a piece that uses a device well, at most a window."""
        work, window = self.rules.work, self.rules.window
        overhead = 2 * work.forward(max(window // OVERHEAD, 1))
        least = UTILISED_PERCENT * overhead // (100 - UTILISED_PERCENT)
        return min(bisect_left(range(window), least, key=work.total), window)


def lower_bound(costs: Sequence[int], own: Sequence[int], stages: int) -> int:
    """Equation 2: no packing of these pieces has a value of Equation 1 below it.

    A pipeline that begins and ends with short micro-batches may take less.

    Args:
        costs: forward and backward cost of every piece, on one stage.
        own: indices of the pipeline's pieces.
        stages: depth of the pipeline.
    """
    mine = [costs[index] for index in own]
    return sum(mine) + (stages - 1) * max(mine, default=0)


def deal_greedily(
    costs: Sequence[int], replicas: int, stages: int, trials: int = TRIALS, seed: int = 0
) -> list[list[int]]:
    """Algorithm 1: greedy dealing in random order, the best of many trials.

    All trials run at once. Of replicas after which the largest bound is the same, the paper takes
    the first; this takes the one whose own bound is least, which keeps more open.

    Args:
        costs: of each piece.
        replicas: number of pipelines.
        stages: depth of each.
        trials: number of random orders.
        seed: of the orders; the same seed gives the same answer on any machine.

    Returns:
        For each replica the indices of its pieces, ascending.
    """
    # 62 bits hold the largest bound, whatever the unit of the costs is.
    unit = (stages * sum(costs) >> 62) + 1
    units = np.array([cost // unit for cost in costs], dtype=np.int64)
    generator = np.random.default_rng(seed)
    orders = np.array([generator.permutation(len(costs)) for _ in range(trials)])
    trial, each = np.arange(trials), np.arange(replicas)
    totals, longest, bounds = (np.zeros((trials, replicas), np.int64) for _ in range(3))
    homes = np.zeros((trials, len(costs)), np.int64)
    for pieces in orders.T:
        cost = units[pieces, None]
        grown = totals + cost + (stages - 1) * np.maximum(longest, cost)
        first = bounds.argmax(axis=1)
        others = bounds.copy()
        others[trial, first] = 0
        # The largest bound of the other replicas, for each replica.
        others = np.where(
            each == first[:, None], others.max(axis=1)[:, None], bounds.max(axis=1)[:, None]
        )
        after = np.maximum(grown, others)
        least = after == after.min(axis=1)[:, None]
        chosen = np.where(least, grown, np.iinfo(np.int64).max).argmin(axis=1)
        homes[trial, pieces] = chosen
        totals[trial, chosen] += cost[:, 0]
        longest[trial, chosen] = np.maximum(longest[trial, chosen], cost[:, 0])
        bounds[trial, chosen] = grown[trial, chosen]
    best = homes[bounds.max(axis=1).argmin()]
    return [np.flatnonzero(best == replica).tolist() for replica in range(replicas)]


def deal_exactly(
    costs: Sequence[int], replicas: int, stages: int, nodes: int = 1000
) -> tuple[list[list[int]], bool]:
    """Equation 3 as an integer program, solved by CBC through PuLP; for a few dozen pieces.

    Args:
        costs: of each piece.
        replicas: number of pipelines.
        stages: depth of each.
        nodes: most branch-and-bound nodes.

    Returns:
        For each replica the indices of its pieces, ascending, and whether they are proven best.

    Raises:
        RuntimeError: no dealing was found within the nodes.
    """
    unit = max(sum(costs) / replicas, 1.0)
    model = pulp.LpProblem("dispatch", pulp.LpMinimize)
    slowest = pulp.LpVariable("slowest", lowBound=0)
    longest = [pulp.LpVariable(f"longest_{r}", lowBound=0) for r in range(replicas)]
    on = [
        [pulp.LpVariable(f"m_{i}_{r}", cat=pulp.LpBinary) for r in range(replicas)]
        for i in range(len(costs))
    ]
    model += slowest
    for i, cost in enumerate(costs):
        model += pulp.lpSum(on[i]) == 1
        for r in range(replicas):
            model += longest[r] >= on[i][r] * (cost / unit)
    for r in range(replicas):
        total = pulp.lpSum(on[i][r] * (cost / unit) for i, cost in enumerate(costs))
        model += total + (stages - 1) * longest[r] <= slowest
    model.solve(pulp.PULP_CBC_CMD(msg=False, threads=1, maxNodes=nodes))
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    for i in range(len(costs)):
        values = [variable.value() or 0.0 for variable in on[i]]
        if abs(max(values) - 1) > 1e-4:
            raise RuntimeError(
                f"CBC dealt {len(costs)} pieces to {replicas} pipelines in none of {nodes} nodes."
                " Give it more nodes, or use deal_greedily."
            )
        dealt[values.index(max(values))].append(i)
    return dealt, model.sol_status == pulp.LpSolutionOptimal


def pack_pipeline(
    pieces: Sequence[Piece],
    stages: int,
    cap: int,
    cost: Callable[[int], int],
    utilised: int = 1,
    solves: int = SOLVES,
) -> MicroBatches:
    """Equation 1 for each number of micro-batches V that is left by Appendix C, and the best V.

    Each V is packed greedily. Then the solver is asked for those V by which a packing could be 1 %
    faster than the best so far, first for that which promises most.

    Args:
        pieces: of one pipeline, none longer than ``cap``.
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
        answer = solve(problem, "cbc", NODES, None)
        if answer is None:
            continue
        time = (stages - 1 + bins) * heaviest_of(problem, answer)
        if time < least:
            least, best = time, [[] for _ in range(bins)]
            for piece, index in zip(pieces, answer, strict=True):
                best[index].append(piece)
    return [own for own in best if own]
