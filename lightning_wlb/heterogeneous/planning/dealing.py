"""A step on pipelines that differ: its pieces are dealt to kinds of pipelines, and packed there.

The pipelines of a *kind* have equal shapes. Dealing (Hydraulis §6.2) needs the cost of each piece
on each pipeline that can hold it, which is predicted from the device profile. Algorithm 1 deals

* whole pieces to pipelines; one of P stages also waits P - 1 times for its longest piece,
* the same as if each pipeline had one stage, since slices leave it little to wait for,
* or pieces to kinds, as if the pipelines of a kind shared every piece: where a piece fits on no
  pipeline, or has so much work that pipelines would be uneven, and the packing shares pieces.

The run's packing then arranges all pieces of a kind as on a mesh of its pipelines alone: it deals
them anew, and may let several pipelines share a piece (DP-Merge). The results are simulated, and
the dealing stays whose latest kind ends first. Each kind's simulated time, relative to its
predicted costs, corrects these costs for another dealing, while that helps.

The predictors of the kinds know when parameters have arrived, and gradients at their shards
(:mod:`.exchange_times`).

Cost: two to four times that of a packing's plan of each kind, and of Algorithm 1; a kind that gets
the same pieces again is planned once. It needs a device profile: exact work does not know which
pipeline is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.plan import (
    ActivationCheckpointing,
    Piece,
    Recompute,
    ReplicaPlan,
    Scheme,
    Schemes,
    Shape,
    Slice,
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
from lightning_wlb.sharding import ADAPTIVE, choose

UNEVEN_PERCENT = 110
"""Pieces are dealt to kinds where the busiest pipeline has more than 110 % of the busiest kind's
predicted time."""

DEALT_AGAIN = 2
"""Times at most that pieces are dealt again, by what pipelines took."""

UTILISED = 4096
"""Tokens on a context rank that use its device well: shorter documents share a micro-batch."""


def documents_ns(predictor: Predictor, tokens: int, modes: Sequence[Recompute]) -> list[float]:
    """Forward and backward of one document on the slowest stage in ns: Hydraulis' T (B.2).

    Of short documents as many as fill a micro-batch are predicted together, and the time is divided
    by their number. Bubbles, imbalance and gathering of parameters are not in it.

    Args:
        predictor: predicts steps of the model on the pipeline's mesh.
        tokens: length of the document.
        modes: what its micro-batch recomputes; several take hardly longer to predict than one.

    Returns:
        The time in each mode.
    """
    mesh = predictor.latency.mesh
    copies = max(UTILISED * mesh.context // tokens, 1)
    name, _ = choose([tokens] * copies, mesh.context, mesh.tensor, predictor.latency.segment_cost)
    slices = [Slice(number, 0, 0, tokens) for number in range(copies)]
    cost = predictor.micro_batch(slices, name)
    stages = {parts: stage for stage, parts in enumerate(predictor.memory.parts)}.values()
    costs = [cost._replace(recompute=mode) for mode in modes]
    return [
        max(sum(predictor.action_ns(stage, each)) for stage in stages) / copies for each in costs
    ]


@dataclass(frozen=True, eq=False)
class PipelineKind:
    """The pipelines of one kind, which plan the pieces that are dealt to them.

    Args:
        scheme: one of the pipelines.
        predictor: predicts steps on a mesh of such pipelines over all ranks, since parameters are
            sharded over all ranks.
        activation_checkpointing: what all micro-batches recompute; ``"auto"``: the least that fits.
        sharding: how every micro-batch lies on the context ranks.
        count: number of the pipelines.
    """

    scheme: Scheme
    predictor: Predictor
    activation_checkpointing: ActivationCheckpointing = "auto"
    sharding: str = ADAPTIVE
    count: int = 1

    @cached_property
    def scorer(self) -> ProfileScorer:
        """Scores plans of the pipelines."""
        return ProfileScorer(self.predictor, self.activation_checkpointing)

    @cached_property
    def place(self) -> Placement:
        """Where the packing arranges the pieces: a mesh of these pipelines alone."""
        slices = SCHEDULES[self.predictor.schedule].slices
        return Placement(self.scheme.mesh(self.count), self.sharding, self.scorer, slices)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest piece that a pipeline can hold; 0 if none."""
        return max(self.scorer.longest, default=0)

    def longest_shared(self, packer: Packer) -> int:
        """Tokens of the longest piece that the pipelines hold, together if the packing shares."""
        shares = packer.compares_plans and self.place.slices
        return self.longest << (self.count.bit_length() - 1 if shares else 0)

    def costs(self, tokens: Sequence[int]) -> list[int]:
        """Forward and backward of pieces of these lengths on the slowest stage, in ns.

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
        given = self.activation_checkpointing
        modes = MODES if given == "auto" else (given,)
        limits = [(self.predictor.longest_micro_batch(1, mode), mode) for mode in modes]
        longest = self.longest << (self.count.bit_length() - 1)
        grid = (2 ** (np.arange(12, 2 * longest.bit_length()) / 2)).astype(np.int64)
        grid = np.append(grid[grid < longest], max(longest, 1))
        times: list[float] = []
        for length in grid.tolist():
            mode = next((mode for most, mode in limits if most >= length), modes[-1])
            times += documents_ns(self.predictor, length, [mode])
        return grid, np.array(times)

    def plan(self, pieces: Sequence[Piece], packer: Packer) -> list[ReplicaPlan]:
        """The plan of each pipeline for some pieces, as of the replicas of a mesh of their own."""
        made = packer.replicas([list(pieces)], self.place)
        cost = self.predictor.latency.segment_cost
        return self.scorer.settled(laid_out(made, self.place.mesh, self.sharding, cost))


Kinds = Mapping[Shape, PipelineKind]
"""The kinds of a step's pipelines, by shape."""


def arrange(
    pieces: Sequence[Piece],
    schemes: Schemes,
    kinds: Kinds,
    rules: Rules,
    packer: Callable[[Rules], Packer],
) -> PlannedStep:
    """Deal the pieces of a step and pack them, for the shortest simulated step.

    Args:
        pieces: all pieces of the step.
        schemes: the pipelines of the step.
        kinds: the kind of each pipeline.
        rules: settings of the run; each kind gets micro-batches in proportion to its ranks.
        packer: makes the packing that arranges the pieces of a kind.

    Raises:
        ValueError: a piece is too long for every kind, or the packing makes micro-batches for all
            pipelines at once.
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
        costs: [pieces][columns], ns of a piece; None where it does not fit.
        kinds: number of each column's kind.
        stages: depth of each column's pipelines; 1 where slices leave little to wait for.
    """

    costs: Costs
    kinds: Sequence[int]
    stages: Sequence[int]


class _Planned(NamedTuple):
    """The plans of a kind's pipelines for their pieces, and how good they are."""

    excess: int  # bytes above what may be filled
    time_ns: int  # until gradients have arrived and the optimizer has run
    end_ns: int  # until the last action has ended
    plans: Sequence[ReplicaPlan]


class _Dealt(NamedTuple):
    """Which kind each piece is dealt to.

    Attributes:
        columns: the table by which pieces were dealt.
        latest: the largest sum of costs in a column.
        own: for each kind the indices of its pieces.
    """

    columns: _Columns
    latest: int
    own: Sequence[Sequence[int]]


class _Tried(NamedTuple):
    """A dealing with the plans of each kind."""

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
        """Two tables with a column for each pipeline, and one with a column for each kind.

        The second counts every pipeline as one stage. There are no tables of pipelines where a
        piece fits on none of them, or there is one kind, and None for the kinds where their
        pipelines would share nothing.
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
        # There is a column for each pipeline of the kind, or one with the part of each of them.
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
    """The plan, with ``number`` of each pipeline's number among those that share a micro-batch."""
    return plan.changed(lambda each: replace(each, replicas=tuple(map(number, each.replicas))))
