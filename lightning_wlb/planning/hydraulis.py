"""Dealing documents to pipelines as Hydraulis does: its Equation 3 and its Algorithm 1.

Before the pieces of a pipeline are packed, its time is not known; Equation 2 bounds it from below
by its total cost and P - 1 times its costliest piece. Equation 3 deals the pieces so that the
largest such bound is least: an integer program, here the definition. Algorithm 1 deals them one by
one in random order, each where the largest bound grows least, and keeps the best of many trials.

All pipelines have the same parallel scheme here, so that any piece can run on any of them. The
bound is that of equal or badly ordered micro-batches; :func:`~.dispatch.deal_by_time` reckons with
half the stall and needs no trials.

Cost: Algorithm 1 takes O(trials · n · R) for n pieces and R pipelines, 0.1 s for 3,000 pieces, 16
pipelines and one trial. The integer program is for a few dozen pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pulp

TRIALS = 100  # of the paper's experiments


def lower_bound(costs: Sequence[int], own: Sequence[int], stages: int) -> int:
    """Equation 2: no packing of these pieces runs through their pipeline in less.

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

    Args:
        costs: of each piece.
        replicas: number of pipelines.
        stages: depth of each.
        trials: number of random orders.
        seed: of the orders; the same seed gives the same answer on any machine.

    Returns:
        For each replica the indices of its pieces, ascending.
    """
    generator = np.random.default_rng(seed)
    best: list[list[int]] = [[] for _ in range(replicas)]
    least = -1
    for _ in range(trials):
        totals, longest = [0] * replicas, [0] * replicas
        bounds = [0] * replicas
        dealt: list[list[int]] = [[] for _ in range(replicas)]
        for index in generator.permutation(len(costs)).tolist():
            cost = costs[index]
            grown = [
                totals[replica] + cost + (stages - 1) * max(longest[replica], cost)
                for replica in range(replicas)
            ]
            # The largest bound after the deal is that of the other pipelines or the grown one's.
            top = max(bounds)
            others = top if bounds.count(top) > 1 else max([0, *_without(bounds, top)])
            after = [
                max(grown[replica], others if bounds[replica] == top else top)
                for replica in range(replicas)
            ]
            # Among equals the paper takes the first; the one that grows least keeps more open.
            chosen = min(range(replicas), key=lambda replica: (after[replica], grown[replica]))
            dealt[chosen].append(index)
            totals[chosen] += cost
            longest[chosen] = max(longest[chosen], cost)
            bounds[chosen] = grown[chosen]
        if least < 0 or max(bounds) < least:
            least, best = max(bounds), dealt
    return [sorted(own) for own in best]


def deal_exactly(
    costs: Sequence[int], replicas: int, stages: int, nodes: int = 1000
) -> tuple[list[list[int]], bool]:
    """Equation 3 as an integer program, solved by CBC through PuLP.

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


def _without(values: Sequence[int], value: int) -> list[int]:
    return [each for each in values if each != value]
