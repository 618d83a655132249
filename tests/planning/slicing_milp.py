"""The slicing problem as a mixed-integer linear programme: the definition of its optimum.

SlimPack §4.1.1 states phase 2 as a MILP over cut positions. Work is quadratic in tokens, so here
positions are restricted to the tile grid on which :mod:`~lightning_wlb.planning.slicing` cuts as
well, and the work of each tile is a constant. For piece i, pack j and tile k the binary
``placed[i, j, k]`` says that tile k lies in pack j or an earlier one. It falls with k and rises
with j, which keeps the slices of a piece in order. The largest load is minimised; the number of
slices is not, and which of several optima comes out is the solver's choice.

For small instances, to hold the fast construction against: binaries are pieces times packs times
tiles, and beyond a few hundred the solver's time is exponential.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pulp

from lightning_wlb.cost.attention_tiles import TILE
from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import Piece, Slice
from lightning_wlb.planning.tuning import LEAST_SLICE


def slice_pieces_milp(
    pieces: Sequence[Piece],
    packs: int,
    cap: int,
    work: PassWork,
    *,
    tile: int = TILE,
    least: int = LEAST_SLICE,
    gap: float = 0.002,
    nodes: int = 20_000,
) -> list[list[Slice]]:
    """The MicroPacks of one replica with the least largest work; arguments as ``slice_pieces``.

    The largest work may be above its lower bound by the share ``gap``; the solver explores
    ``nodes`` nodes at most.
    """
    lengths = [piece.tokens for piece in pieces]
    unit = max(sum(work(length) for length in lengths) / packs, 1)
    problem = pulp.LpProblem("slices", pulp.LpMinimize)
    largest = pulp.LpVariable("largest", 0)
    loads: list[list[Any]] = [[] for _ in range(packs)]
    tokens: list[list[Any]] = [[] for _ in range(packs)]
    grids: list[list[int]] = []
    placed: list[list[list[Any]]] = []
    for number, length in enumerate(lengths):
        grid = [*range(0, length, tile), length]
        grids.append(grid)
        tiles = range(len(grid) - 1)
        of_piece = [
            [pulp.LpVariable(f"placed_{number}_{pack}_{k}", cat="Binary") for k in tiles]
            for pack in range(packs)
        ]
        placed.append(of_piece)
        for pack in range(packs):
            for k in tiles:
                if k:
                    problem += of_piece[pack][k] <= of_piece[pack][k - 1]
                if pack:
                    problem += of_piece[pack][k] >= of_piece[pack - 1][k]
                if pack == packs - 1:
                    problem += of_piece[pack][k] == 1
            inside = [of_piece[pack][k] - (of_piece[pack - 1][k] if pack else 0) for k in tiles]
            loads[pack] += [(work(grid[k + 1]) - work(grid[k])) / unit * inside[k] for k in tiles]
            size = pulp.lpSum((grid[k + 1] - grid[k]) * inside[k] for k in tiles)
            tokens[pack].append(size)
            has = pulp.LpVariable(f"has_{number}_{pack}", cat="Binary")
            problem += size <= length * has
            problem += size >= min(least, length) * has
    for pack in range(packs):
        problem += pulp.lpSum(loads[pack]) <= largest
        problem += pulp.lpSum(tokens[pack]) <= cap
    problem.setObjective(largest)
    problem.solve(pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=gap, maxNodes=nodes))
    assert problem.sol_status == pulp.LpSolutionOptimal, pulp.LpStatus[problem.status]
    result: list[list[Slice]] = [[] for _ in range(packs)]
    for piece, grid, of_piece in zip(pieces, grids, placed, strict=True):
        start = 0
        for pack in range(packs):
            stop = grid[sum(round(pulp.value(variable)) for variable in of_piece[pack])]
            if stop > start:
                origin = piece.origin
                result[pack].append(Slice(piece.document, origin, origin + start, origin + stop))
            start = stop
    return [pack for pack in result if pack]
