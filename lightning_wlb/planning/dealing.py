"""Pieces dealt to pipelines that need not be alike: Hydraulis' Equation 3 and its Algorithm 1.

What a pipeline takes is not known before its pieces are packed, but it is not below their cost on
one stage, and P - 1 times the costliest of them (Equation 2). Equation 3 deals so that the largest
bound is least, each piece to a pipeline that can hold it. It is an integer program, here
:func:`deal_exactly`, the definition. :func:`deal_greedily` is the paper's Algorithm 1: pieces go
one by one in random order, each where the largest bound grows least, and the best of 100 trials
stays.

A pipeline that begins and ends with short micro-batches may take less than its bound, and one whose
pieces leave its last micro-batches empty more: whoever needs the step simulates it.

Cost: O(trials · P · R) for P pieces and R pipelines in compiled loops; Equation 3 takes seconds for
a few dozen pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pulp

TRIALS = 100  # of the paper's experiments

Costs = Sequence[Sequence[int | None]]
"""Of each piece, on each pipeline: forward and backward on one stage; None where it cannot run."""


def lower_bound(costs: Costs, own: Sequence[int], pipeline: int, stages: int) -> int:
    """Equation 2: no packing of these pieces has a value of Equation 1 below it.

    Args:
        costs: of all pieces.
        own: indices of the pipeline's pieces.
        pipeline: its number.
        stages: its depth.
    """
    mine = [costs[index][pipeline] or 0 for index in own]
    return sum(mine) + (stages - 1) * max(mine, default=0)


def deal_greedily(
    costs: Costs, stages: Sequence[int], trials: int = TRIALS, seed: int = 0
) -> list[list[int]]:
    """Algorithm 1: greedy dealing in random order, the best of many trials.

    All trials run at once. Of pipelines after which the largest bound is the same, the paper takes
    the first; this takes the one whose own bound is least, which keeps more open.

    Args:
        costs: of each piece on each pipeline.
        stages: depth of each pipeline.
        trials: number of random orders.
        seed: of the orders; the same seed gives the same answer on any machine.

    Returns:
        For each pipeline the indices of its pieces, ascending.

    Raises:
        ValueError: a piece that no pipeline can run.
    """
    _check(costs)
    # 62 bits hold the largest bound, whatever the unit of the costs is.
    unit = (max(stages) * sum(max(filter(None, each), default=0) for each in costs) >> 62) + 1
    never = np.iinfo(np.int64).max
    units = np.array([[(cost or 0) // unit for cost in each] for each in costs], dtype=np.int64)
    runs = np.array([[cost is not None for cost in each] for each in costs], dtype=bool)
    units, runs = (each.reshape(len(costs), len(stages)) for each in (units, runs))
    deeper = np.array(stages, dtype=np.int64) - 1
    generator = np.random.default_rng(seed)
    orders = np.array([generator.permutation(len(costs)) for _ in range(trials)])
    trial, each = np.arange(trials), np.arange(len(stages))
    totals, longest, bounds = (np.zeros((trials, len(stages)), np.int64) for _ in range(3))
    homes = np.zeros((trials, len(costs)), np.int64)
    for pieces in orders.T:
        cost = units[pieces]
        grown = totals + cost + deeper * np.maximum(longest, cost)
        first = bounds.argmax(axis=1)
        others = bounds.copy()
        others[trial, first] = 0
        # The largest bound of the other pipelines, for each pipeline.
        others = np.where(
            each == first[:, None], others.max(axis=1)[:, None], bounds.max(axis=1)[:, None]
        )
        after = np.where(runs[pieces], np.maximum(grown, others), never)
        least = after == after.min(axis=1)[:, None]
        chosen = np.where(least, grown, never).argmin(axis=1)
        homes[trial, pieces] = chosen
        totals[trial, chosen] += cost[trial, chosen]
        longest[trial, chosen] = np.maximum(longest[trial, chosen], cost[trial, chosen])
        bounds[trial, chosen] = grown[trial, chosen]
    best = homes[bounds.max(axis=1).argmin()]
    return [np.flatnonzero(best == pipeline).tolist() for pipeline in range(len(stages))]


def deal_exactly(
    costs: Costs, stages: Sequence[int], nodes: int = 1000
) -> tuple[list[list[int]], bool]:
    """Equation 3 as an integer program, solved by CBC through PuLP; for a few dozen pieces.

    Args:
        costs: of each piece on each pipeline.
        stages: depth of each pipeline.
        nodes: most branch-and-bound nodes.

    Returns:
        For each pipeline the indices of its pieces, ascending, and whether they are proven best.

    Raises:
        ValueError: a piece that no pipeline can run.
        RuntimeError: no dealing was found within the nodes.
    """
    _check(costs)
    pipelines = range(len(stages))
    unit = max(sum(max(filter(None, each), default=0) for each in costs) / len(stages), 1.0)
    model = pulp.LpProblem("dispatch", pulp.LpMinimize)
    slowest = pulp.LpVariable("slowest", lowBound=0)
    longest = [pulp.LpVariable(f"longest_{r}", lowBound=0) for r in pipelines]
    on = [
        {
            r: pulp.LpVariable(f"m_{i}_{r}", cat=pulp.LpBinary)
            for r in pipelines
            if each[r] is not None
        }
        for i, each in enumerate(costs)
    ]
    model += slowest
    for i, each in enumerate(costs):
        model += pulp.lpSum(on[i].values()) == 1
        for r, variable in on[i].items():
            model += longest[r] >= variable * ((each[r] or 0) / unit)
    for r in pipelines:
        total = pulp.lpSum(
            on[i][r] * ((each[r] or 0) / unit) for i, each in enumerate(costs) if r in on[i]
        )
        model += total + (stages[r] - 1) * longest[r] <= slowest
    model.solve(pulp.PULP_CBC_CMD(msg=False, threads=1, maxNodes=nodes))
    dealt: list[list[int]] = [[] for _ in pipelines]
    for i, variables in enumerate(on):
        values = {r: variable.value() or 0.0 for r, variable in variables.items()}
        home = max(values, key=values.__getitem__)
        if abs(values[home] - 1) > 1e-4:
            raise RuntimeError(
                f"CBC dealt {len(costs)} pieces to {len(stages)} pipelines in none of {nodes}"
                " nodes. Give it more nodes, or use deal_greedily."
            )
        dealt[home].append(i)
    return dealt, model.sol_status == pulp.LpSolutionOptimal


def _check(costs: Costs) -> None:
    for index, each in enumerate(costs):
        if all(cost is None for cost in each):
            raise ValueError(
                f"piece {index} can run on none of {len(each)} pipelines: it is longer than any of"
                " them holds. Give a pipeline of more context or tensor ranks."
            )
