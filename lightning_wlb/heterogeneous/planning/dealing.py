"""A step on pipelines that differ: pieces are dealt to each kind of them, and packed there.

A kind is the pipelines that are alike. Dealing (Hydraulis §6.2) takes what a piece costs on a
pipeline, where it fits at all, from the device profile. Algorithm 1 deals

* whole pieces to pipelines, which wait P - 1 times for their longest if they have P stages,
* the same as if there were one stage, since slices leave a pipeline little to wait for,
* or, where a piece fits on no pipeline, or has so much work that they would be uneven, pieces to
  kinds, each as if its pipelines shared every piece: the packing ``auto`` lets them share it.

What the pipelines of a kind got is put together, and the run's packing arranges it as on a mesh of
them alone: it deals anew, and may let several share a piece (DP-Merge). Times are simulated then:
of the dealings the one stays whose latest kind ends first, and what each kind takes beside its
predicted costs corrects these for another dealing, while that helps.

The predictors of the kinds know when parameters have arrived, and gradients at their shards
(:mod:`.exchange_times`).

Cost: two to four times that of a packing's plan of each kind, and of Algorithm 1; a kind that gets
the same pieces again is planned once. Not without a device profile: exact work does not know which
pipeline is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.heterogeneous.planning.document_time import document_ns
from lightning_wlb.plan import (
    ActivationCheckpointing,
    Piece,
    ReplicaPlan,
    Scheme,
    Schemes,
    Shape,
    alike,
)
from lightning_wlb.planning.dealing import Costs, deal_greedily, longest_first
from lightning_wlb.planning.packing.base import Packer, Rules
from lightning_wlb.planning.plan_scoring import Placement, ProfileScorer
from lightning_wlb.planning.replica_plans import laid_out
from lightning_wlb.planning.step_chooser import PlannedStep, check_packing
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.sharding import ADAPTIVE

UNEVEN_PERCENT = 110
"""Predicted end of the latest pipeline, to that of kinds, above which pieces are dealt to kinds."""

DEALT_AGAIN = 2
"""Times at most that pieces are dealt again, knowing what pipelines took."""


@dataclass(frozen=True, eq=False)
class PipelineKind:
    """The pipelines of one kind: what they can do with the pieces that are dealt to them.

    Args:
        scheme: of such a pipeline, on any ranks.
        predictor: of the model on a mesh of pipelines that are all like this one, as many as there
            are ranks for, since parameters are sharded over all ranks.
        activation_checkpointing: of all micro-batches; ``"auto"``: the least that fits.
        sharding: of every micro-batch.
        count: of these pipelines.
    """

    scheme: Scheme
    predictor: Predictor
    activation_checkpointing: ActivationCheckpointing = "auto"
    sharding: str = ADAPTIVE
    count: int = 1

    @cached_property
    def scorer(self) -> ProfileScorer:
        """Simulates the pipelines."""
        return ProfileScorer(self.predictor, self.activation_checkpointing)

    @cached_property
    def place(self) -> Placement:
        """What the pipelines' pieces are arranged for."""
        mesh, layout = self.scheme.mesh(self.count), self.sharding
        return Placement(mesh, layout, self.scorer, SCHEDULES[self.predictor.schedule].slices)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest piece that a pipeline can hold; 0 if none."""
        return max(self.scorer.longest, default=0)

    def longest_shared(self, packer: Packer) -> int:
        """Tokens of the longest piece that the pipelines can hold, as this packing shares them."""
        shares = packer.compares_plans and self.place.slices
        return self.longest << (self.count.bit_length() - 1 if shares else 0)

    def costs(self, tokens: Sequence[int]) -> list[int]:
        """The ns of forward and backward of pieces on one stage of a pipeline.

        Predicted for half-powers of two from 64 on, up to the longest that all pipelines hold
        together, and interpolated between them for each token.
        """
        grid, times = self._predicted
        per_token = np.interp(tokens, grid, times / grid)
        return [
            round(length * each) for length, each in zip(tokens, per_token.tolist(), strict=True)
        ]

    @cached_property
    def _predicted(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Lengths, and what a piece of each takes."""
        given = self.activation_checkpointing
        modes = MODES if given == "auto" else (given,)
        limits = [(self.predictor.longest_micro_batch(1, mode), mode) for mode in modes]
        longest = self.longest << (self.count.bit_length() - 1)
        grid = (2 ** (np.arange(12, 2 * longest.bit_length()) / 2)).astype(np.int64)
        grid = np.append(grid[grid < longest], max(longest, 1))
        times = [
            document_ns(
                self.predictor,
                length,
                next((mode for most, mode in limits if most >= length), modes[-1]),
            )
            for length in grid.tolist()
        ]
        return grid, np.array(times)

    def plan(self, pieces: Sequence[Piece], packer: Packer) -> list[ReplicaPlan]:
        """What the pipelines do with some pieces, as the replicas of a mesh of their own."""
        made = packer.replicas([list(pieces)], self.place)
        cost = self.predictor.latency.segment_cost
        return self.scorer.settled(laid_out(made, self.place.mesh, self.sharding, cost))


Kinds = Mapping[Shape, PipelineKind]
"""The kinds of some pipelines, by shape."""


def arrange(
    pieces: Sequence[Piece],
    schemes: Schemes,
    kinds: Kinds,
    rules: Rules,
    packer: Callable[[Rules], Packer],
) -> PlannedStep:
    """Deal the pieces of a step and pack them, for the shortest simulated step.

    Args:
        pieces: of the step.
        schemes: the pipelines.
        kinds: of all these pipelines.
        rules: of the run. The share of a kind in the micro-batches is that of its ranks.
        packer: makes the packing that arranges the pieces of a kind.

    Raises:
        ValueError: a piece that no pipelines can hold, or a packing whose micro-batches are made
            for all pipelines at once.
    """
    check_packing(packer(rules))
    numbers = alike(schemes)
    own_kinds = [kinds[shape] for shape in numbers]
    ranks = sum(scheme.size for scheme in schemes)
    packers = []
    for each in own_kinds:
        share = rules.micro_batches * each.count * each.scheme.size // ranks
        packers.append(packer(replace(rules, micro_batches=max(share, 1))))
    best = _StepDealing(longest_first(pieces), own_kinds, packers).best()
    cap = max(each.cap(of.place) for each, of in zip(packers, own_kinds, strict=True))
    replicas: dict[int, ReplicaPlan] = {}
    for own, made in zip(numbers.values(), best.made, strict=True):
        replicas |= zip(
            own, (renumbered(plan, own.__getitem__) for plan in made.plans), strict=True
        )
    every = tuple(replicas[number] for number in sorted(replicas))
    return PlannedStep(schemes, best.excess, best.time_ns, every, cap)


class _Columns(NamedTuple):
    """A table for dealing pieces: one column for each pipeline, or one for each kind.

    Attributes:
        costs: of each piece in each column; None where it does not fit.
        kinds: number of each column's kind.
        stages: of the pipelines of each column; 1 where slices leave little to wait for.
    """

    costs: Costs
    kinds: Sequence[int]
    stages: Sequence[int]


class _Planned(NamedTuple):
    """What the pipelines of a kind make of their pieces."""

    excess: int
    time_ns: int
    end_ns: int  # of the last action; time_ns has what then still travels
    plans: Sequence[ReplicaPlan]


class _Dealt(NamedTuple):
    """A dealing.

    Attributes:
        columns: the table by which pieces were dealt.
        latest: the largest sum of costs in a column.
        own: for each kind the indices of its pieces.
    """

    columns: _Columns
    latest: int
    own: Sequence[Sequence[int]]


class _Tried(NamedTuple):
    """What each kind makes of a dealing."""

    excess: int
    time_ns: int
    dealing: _Dealt
    made: Sequence[_Planned]


@dataclass(frozen=True)
class _StepDealing:
    """The pieces of a step, the longest first, and the kinds that they are dealt to."""

    pieces: Sequence[Piece]
    kinds: Sequence[PipelineKind]
    packers: Sequence[Packer]
    _planned: dict[tuple[int, tuple[int, ...]], _Planned] = field(default_factory=dict)

    def best(self) -> _Tried:
        """The dealing after which the latest kind ends first, of those that the module names."""
        apart, together = self._columns()
        dealings = [self._dealt(columns) for columns in apart]
        if together is not None:
            shared = self._dealt(together)
            if not dealings or 100 * dealings[-1].latest > UNEVEN_PERCENT * shared.latest:
                dealings = [shared]
        best = min(map(self._tried, dealings), key=lambda each: each[:2])
        for _ in range(DEALT_AGAIN if len(self.kinds) > 1 else 0):
            again = self._tried(self._dealt(_corrected(best)))
            if again[:2] >= best[:2]:
                break
            best = again
        return best

    def _columns(self) -> tuple[list[_Columns], _Columns | None]:
        """Two tables of all pipelines, the second as if they had one stage; and that of the kinds.

        No pipelines where a piece fits in none of them, or there is one kind; None for the kinds
        where nothing would be shared.
        """
        tokens, every = [piece.tokens for piece in self.pieces], self.kinds
        alone = [each.longest for each in every]
        longest = [e.longest_shared(own) for e, own in zip(every, self.packers, strict=True)]
        if max(tokens) > max(longest):
            raise ValueError(
                f"document {self.pieces[0].document} has a piece of {max(tokens)} tokens, of which"
                f" these pipelines hold {max(longest)}:"
                f" {'; '.join(str(each.scheme) for each in every)}. Give one of more context or"
                " tensor ranks, or lower the context window."
            )
        costs = [each.costs(tokens) for each in every]

        def column(kind: int, longest: int, parts: int) -> list[int | None]:
            priced = zip(tokens, costs[kind], strict=True)
            return [cost // parts if length <= longest else None for length, cost in priced]

        numbers, apart = range(len(every)), []
        if len(every) > 1 and max(tokens) <= max(alone):
            kinds = [kind for kind in numbers for _ in range(every[kind].count)]
            table = list(zip(*(column(kind, alone[kind], 1) for kind in kinds), strict=True))
            depths = [len(every[kind].scheme.stages) for kind in kinds]
            apart = [_Columns(table, kinds, stages) for stages in (depths, [1] * len(kinds))]
        counts = [each.count for each in every]
        if apart and not (self.packers[0].compares_plans and max(counts) > 1):
            return apart, None
        table = list(zip(*map(column, numbers, longest, counts), strict=True))
        return apart, _Columns(table, numbers, [1] * len(numbers))

    def _dealt(self, columns: _Columns) -> _Dealt:
        costs, kinds, stages = columns
        homes = deal_greedily(costs, stages)
        loads = [
            sum(costs[index][column] or 0 for index in own) for column, own in enumerate(homes)
        ]
        dealt: list[list[int]] = [[] for _ in self.kinds]
        for kind, own in zip(kinds, homes, strict=True):
            dealt[kind] = sorted(dealt[kind] + own)
        return _Dealt(columns, max(loads), dealt)

    def _tried(self, dealing: _Dealt) -> _Tried:
        made = [self._made(kind, own) for kind, own in enumerate(dealing.own)]
        excess, time_ns = max(each.excess for each in made), max(each.time_ns for each in made)
        return _Tried(excess, time_ns, dealing, made)

    def _made(self, kind: int, own: Sequence[int]) -> _Planned:
        of_kind, key = self.kinds[kind], (kind, tuple(own))
        if not own:
            return _Planned(0, 0, 0, [ReplicaPlan((), (), ())] * of_kind.count)
        if key not in self._planned:
            plans = of_kind.plan([self.pieces[index] for index in own], self.packers[kind])
            scorer = of_kind.scorer
            time_ns, peak = scorer(plans)
            excess, end_ns = max(peak - scorer.limit, 0), max(scorer.ends(plans))
            self._planned[key] = _Planned(excess, time_ns, end_ns, plans)
        return self._planned[key]


def _corrected(tried: _Tried) -> _Columns:
    """The table with each kind's costs scaled so that those of its pieces add up to its time."""
    costs, kinds, _ = tried.dealing.columns
    factors = []
    for kind, (own, made) in enumerate(zip(tried.dealing.own, tried.made, strict=True)):
        columns = [column for column, of in enumerate(kinds) if of == kind]
        # A column for each pipeline, or one with each one's part.
        predicted = sum(costs[index][columns[0]] or 0 for index in own) // len(columns)
        factors.append(made.end_ns / predicted if predicted else 1.0)
    scaled = [
        [
            None if cost is None else round(cost * factors[kind])
            for cost, kind in zip(each, kinds, strict=True)
        ]
        for each in costs
    ]
    return _Columns(scaled, kinds, [1] * len(kinds))


def renumbered(plan: ReplicaPlan, number: Callable[[int], int]) -> ReplicaPlan:
    """A plan whose micro-batches name the pipelines that share them by other numbers.

    Args:
        plan: of one pipeline.
        number: the new number of a pipeline, from its old one.
    """
    forward, backward = (
        tuple(replace(each, replicas=tuple(map(number, each.replicas))) for each in micro_batches)
        for _, micro_batches in plan.passes
    )
    return ReplicaPlan(plan.slices, forward, backward)
