"""Hydraulis' Equation 3 solved exactly: the dealing that ``deal_greedily`` is compared with.

Equation 3 deals pieces to pipelines so that the largest lower bound of a pipeline's time (Equation
2) is least, each piece to a pipeline that can hold it. It is an integer program, solved by CBC
through PuLP in seconds for a few dozen pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from lightning_wlb.planning.dealing import Costs


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
    """
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
        assert abs(values[home] - 1) <= 1e-4, "no dealing was found within the nodes"
        dealt[home].append(i)
    return dealt, model.sol_status == pulp.LpSolutionOptimal
