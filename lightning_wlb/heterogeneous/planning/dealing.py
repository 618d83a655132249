"""A step on pipelines that differ: its pieces are dealt to kinds of pipelines, and packed there.

The pipelines of a *kind* have equal shapes. Dealing (Hydraulis §6.2) needs the cost of each piece
on each kind that can hold it, which is predicted from the device profile. Algorithm 1 deals pieces
to kinds as if the pipelines of a kind shared every piece and had no bubble: slices make it small.

The run's packing then plans the pieces of each kind as on a mesh of that kind's pipelines alone,
and may let several pipelines share a piece (DP-Merge).

The kinds' predictors know when parameters and gradients arrive (:mod:`.exchange_times`).

Cost: one plan of the packing for each kind, and Algorithm 1. It needs a device profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.plan import Piece, Recompute, ReplicaPlan, Scheme, Schemes, Shape, Slice, alike
from lightning_wlb.planning.dealing import deal_greedily, longest_first
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.plan_scoring import Placement, ProfileScorer
from lightning_wlb.planning.replica_plans import laid_out
from lightning_wlb.planning.step_chooser import PlannedStep, check_packing
from lightning_wlb.prediction.micro_batch import modes_of
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding import ADAPTIVE, choose

UTILISED = 4096
"""Tokens on a context rank that use its device well; shorter documents share a micro-batch."""


def document_ns(predictor: Predictor, tokens: int, mode: Recompute) -> float:
    """Forward and backward of one document on the slowest stage in ns: Hydraulis' T (B.2).

    For short documents a micro-batch full of them is predicted, and its time is divided by their
    number. Bubbles, imbalance and the gathering of parameters are left out. ``predictor`` belongs
    to the pipeline's mesh, and micro-batches recompute by ``mode``.
    """
    mesh = predictor.latency.mesh
    copies = max(UTILISED * mesh.context // tokens, 1)
    name, _ = choose([tokens] * copies, mesh.context, mesh.tensor, predictor.latency.segment_cost)
    slices = [Slice(number, 0, 0, tokens) for number in range(copies)]
    cost = predictor.micro_batch(slices, name)
    stages = {parts: stage for stage, parts in enumerate(predictor.memory.parts)}.values()
    cost = cost._replace(recompute=mode)
    return max(sum(predictor.action_ns(stage, cost)) for stage in stages) / copies


@dataclass(frozen=True, eq=False)
class PipelineKind:
    """The pipelines of one kind, and the plans for pieces that are dealt to them."""

    scheme: Scheme  #: one of the pipelines
    #: scores plans of the pipelines. Its predictor has a mesh of such pipelines over all ranks,
    #: since parameters are sharded over all ranks
    scorer: ProfileScorer
    sharding: str = ADAPTIVE  #: how every micro-batch lies on the context ranks
    count: int = 1  #: number of the pipelines

    @cached_property
    def place(self) -> Placement:
        """Where the packing arranges the pieces: a mesh of these pipelines alone."""
        return Placement(self.scheme.mesh(self.count), self.sharding, self.scorer)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest piece that a pipeline can hold; 0 if none."""
        return max(self.scorer.longest, default=0)

    def longest_shared(self, packer: Packer | type[Packer]) -> int:
        """Tokens of the longest piece that the pipelines can hold, together if they may share."""
        return self.longest << (self.count.bit_length() - 1 if packer.compares_plans else 0)

    def costs(self, tokens: Sequence[int]) -> list[int]:
        """Forward and backward time of pieces of these lengths on the slowest stage, in ns.

        Times are predicted for half-powers of two from 64 on, up to the longest piece that all
        pipelines hold together; between them the time per token is interpolated.
        """
        grid, times = self._predicted
        per_token = np.interp(tokens, grid, times / grid)
        return [
            round(length * each) for length, each in zip(tokens, per_token.tolist(), strict=True)
        ]

    @cached_property
    def _predicted(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Lengths of pieces, and the predicted ns of each."""
        predictor = self.scorer.predictor
        modes = modes_of(self.scorer.activation_checkpointing)
        limits = [(predictor.longest_micro_batch(mode), mode) for mode in modes]
        longest = self.longest << (self.count.bit_length() - 1)
        grid = (2 ** (np.arange(12, 2 * longest.bit_length()) / 2)).astype(np.int64)
        grid = np.append(grid[grid < longest], max(longest, 1))
        times: list[float] = []
        for length in grid.tolist():
            mode = next((mode for most, mode in limits if most >= length), modes[-1])
            times.append(document_ns(predictor, length, mode))
        return grid, np.array(times)

    def plan(self, pieces: Sequence[Piece], packer: Packer) -> list[ReplicaPlan]:
        """The plan of each pipeline for some pieces, as replicas of a mesh of these pipelines."""
        made = packer.replicas([list(pieces)], self.place)
        cost = self.scorer.predictor.latency.segment_cost
        return self.scorer.settled(laid_out(made, self.place.mesh, self.sharding, cost))


Kinds = Mapping[Shape, PipelineKind]
"""The kinds of a step's pipelines, by shape."""


def arrange(pieces: Sequence[Piece], schemes: Schemes, kinds: Kinds, packer: Packer) -> PlannedStep:
    """Deal the pieces of a step to kinds of pipelines, and pack the pieces of each kind.

    Args:
        packer: the run's; each kind packs by it, with micro-batches in proportion to its ranks.

    Raises:
        ValueError: a piece is too long for every kind, or the packing plans all pipelines at once.
    """
    check_packing(packer)
    numbers = alike(schemes)
    own_kinds = [kinds[shape] for shape in numbers]
    ranks = sum(scheme.size for scheme in schemes)
    packers = []
    for each in own_kinds:
        share = packer.rules.micro_batches * each.count * each.scheme.size // ranks
        packers.append(type(packer)(replace(packer.rules, micro_batches=max(share, 1))))
    dealt = _dealt(longest_first(pieces), own_kinds, packers)
    excess = time_ns = 0
    replicas: dict[int, ReplicaPlan] = {}
    for own, kind, packer_of, mine in zip(numbers.values(), own_kinds, packers, dealt, strict=True):
        plans: Sequence[ReplicaPlan] = [ReplicaPlan((), ())] * len(own)
        if mine:
            plans = kind.plan(mine, packer_of)
            kind_ns, peak = kind.scorer(plans)
            excess = max(excess, peak - kind.scorer.limit)
            time_ns = max(time_ns, kind_ns)
        replicas |= zip(own, (renumbered(plan, own.__getitem__) for plan in plans), strict=True)
    cap = max(each.cap(of.place) for each, of in zip(packers, own_kinds, strict=True))
    every = tuple(replicas[number] for number in sorted(replicas))
    return PlannedStep(schemes, excess, time_ns, every, cap)


def _dealt(
    pieces: Sequence[Piece], kinds: Sequence[PipelineKind], packers: Sequence[Packer]
) -> list[list[Piece]]:
    """The pieces of each kind, longest first, dealt as if its pipelines shared every piece."""
    tokens = [piece.tokens for piece in pieces]
    longest = [kind.longest_shared(own) for kind, own in zip(kinds, packers, strict=True)]
    if max(tokens) > max(longest):
        raise ValueError(
            f"document {pieces[0].document} has a piece of {max(tokens)} tokens, but these"
            f" pipelines hold {max(longest)}: {'; '.join(str(kind.scheme) for kind in kinds)}."
            " Give a pipeline of more context or tensor ranks, or lower the context window."
        )
    columns = [
        [
            cost // kind.count if length <= most else None
            for length, cost in zip(tokens, kind.costs(tokens), strict=True)
        ]
        for kind, most in zip(kinds, longest, strict=True)
    ]
    homes = deal_greedily(list(zip(*columns, strict=True)), [1] * len(kinds))
    return [[pieces[index] for index in sorted(own)] for own in homes]


def renumbered(plan: ReplicaPlan, number: Callable[[int], int]) -> ReplicaPlan:
    """A plan in which ``number`` maps the numbers of the replicas that share each micro-batch."""
    return plan.changed(lambda each: replace(each, replicas=tuple(map(number, each.replicas))))
