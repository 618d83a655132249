"""Hydraulis' Figure 17 and Table 2: greedy dealing against the integer program, and planning time.

*Figure 17*: documents of a step go to the pipelines of a strategy by Equation 3, as far as the
solver gets in its nodes, and by Algorithm 1. Both are packed by Equation 1. Given is greedy over
ideal: of the largest bound (Equation 2), and of the simulated step.

*Table 2*: seconds of one core for a step, the solver's own process included. The paper gives wall
time for ten steps on ten processes, which is about the same thing. The strategy proposal is made
once for a run.

Only what the paper's solver alone would take is missing on 1,024 devices: Equation 3 there has
a hundred thousand variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.exact_dealing import deal_exactly, lower_bound
from benchmarks.hydraulis_proposal import proposed_strategies
from benchmarks.hydraulis_runs import Sample, in_papers_space, paper_strategies, released
from benchmarks.meshes import Setting
from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.planning.dealing import Kinds
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import described
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import name_of
from lightning_wlb.plan import ActivationCheckpointing, Piece, Schemes
from lightning_wlb.planning.dealing import deal_greedily, longest_first
from lightning_wlb.planning.packing.hydraulis import HydraulisPacker

MOST_VARIABLES = 10_000
"""Pieces times pipelines up to which Equation 3 is solved."""


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of this process and its children, and the result."""
    begin = sum(os.times()[:4])
    made = run()
    return sum(os.times()[:4]) - begin, made


def held(sample: Sample) -> list[tuple[Schemes, Kinds]]:
    """Mixtures of the mesh's own pipelines with others that can hold some documents."""
    own = sample.own[0].shape
    mixed = [
        each
        for each in dict.fromkeys(paper_strategies(sample))
        if len({scheme.shape for scheme in each}) > 1 and each[0].shape == own
    ]
    pool = Pool.of(mixed, sample.base, sample.request.activation_checkpointing)
    return [
        (strategy, kinds)
        for strategy, kinds in pool.kinds.items()
        if min(kind.longest for kind in kinds.values()) > 0
    ]


class Dealt:
    """Pieces of a step, and what they take on each pipeline of a strategy.

    Args:
        pieces: of the step.
        strategy: the pipelines.
        kinds: by shape.
    """

    def __init__(self, pieces: Sequence[Piece], strategy: Schemes, kinds: Kinds) -> None:
        self.order = longest_first(pieces)
        alone = {shape: replace(kind, count=1) for shape, kind in kinds.items()}
        self.receivers = [alone[scheme.shape] for scheme in strategy]
        self.depths = [len(scheme.stages) for scheme in strategy]
        lengths = [piece.tokens for piece in self.order]
        by_kind = {
            each: [
                cost if tokens <= each.longest else None
                for tokens, cost in zip(lengths, each.costs(lengths), strict=True)
            ]
            for each in alone.values()
        }
        self.costs = list(zip(*(by_kind[each] for each in self.receivers), strict=True))

    def bound(self, dealt: Sequence[Sequence[int]]) -> int:
        """The largest bound of the pipelines."""
        return max(
            lower_bound(self.costs, own, pipeline, self.depths[pipeline])
            for pipeline, own in enumerate(dealt)
        )

    def time(self, dealt: Sequence[Sequence[int]], packer: HydraulisPacker) -> int:
        """The simulated step, each pipeline's pieces packed by Equation 1."""
        return max(
            each.scorer(each.plan([self.order[index] for index in own], packer)).time
            for each, own in zip(self.receivers, dealt, strict=True)
            if own
        )


def figure_17(
    setting: Setting,
    profile: Profile,
    steps: int,
    mesh: Mesh,
    mode: ActivationCheckpointing,
    nodes: int,
) -> dict[str, Any]:
    """Greedy over ideal dealing, on a mesh and on the mixture with the least bound."""
    request = in_papers_space(setting.request("hydraulis", profile, steps), mode)
    sample = Sample(request, mesh)
    pieces, rules = released(request)
    packer = HydraulisPacker(rules)

    def promised(each: tuple[Schemes, Kinds]) -> int:
        dealt = Dealt(pieces[0], *each)
        return dealt.bound(deal_greedily(dealt.costs, dealt.depths))

    found = {}
    for strategy, kinds in (
        (sample.own, sample.kinds),
        *sorted(held(sample), key=promised)[:1],
    ):
        bounds, times, proven = [], [], 0
        for step in pieces:
            dealt = Dealt(step, strategy, kinds)
            greedy = deal_greedily(dealt.costs, dealt.depths)
            ideal, best = deal_exactly(dealt.costs, dealt.depths, nodes)
            proven += best
            bounds.append(round(dealt.bound(greedy) / dealt.bound(ideal), 4))
            times.append(round(dealt.time(greedy, packer) / dealt.time(ideal, packer), 4))
        found[described(strategy)] = {"estimated": bounds, "simulated": times, "proven": proven}
    return {"mesh": name_of(mesh), "nodes": nodes, "strategies": found}


def table_2(
    setting: Setting, profile: Profile, mesh: Mesh, mode: ActivationCheckpointing, nodes: int
) -> dict[str, Any]:
    """Planning time of a step on a mesh, in seconds of a core."""
    request = in_papers_space(setting.request("hydraulis", profile, 1), mode)
    sample = Sample(request, mesh)
    (pieces,), rules = released(request)
    packer = HydraulisPacker(rules)
    dealt = Dealt(pieces, sample.own, sample.kinds)
    proposal, proposed = seconds(lambda: proposed_strategies(request))
    greedy, homes = seconds(lambda: deal_greedily(dealt.costs, dealt.depths))
    packing, _ = seconds(lambda: dealt.time(homes, packer))
    row: dict[str, Any] = {
        "devices": setting.devices,
        "mesh": name_of(mesh),
        "tokens": sum(piece.tokens for piece in pieces),
        "documents": len(pieces),
        "proposed": len(proposed),
        "proposal": round(proposal, 3),
        "ideal": None,
        "greedy": round(greedy, 3),
        "packing": round(packing, 3),
    }
    if len(pieces) * len(sample.own) <= MOST_VARIABLES:
        ideal, (_, proven) = seconds(lambda: deal_exactly(dealt.costs, dealt.depths, nodes))
        row |= {"ideal": round(ideal, 3), "proven": proven}
    return row
