"""A step on pipelines that differ: pieces are dealt to them, and packed in each for it alone.

Dealing (Hydraulis §6.2) takes what a piece costs on each pipeline, where it fits at all, from the
device profile. Algorithm 1 deals for whole pieces, which a pipeline of P stages waits P - 1 times
for; and once more as if there were one stage, since slices leave a pipeline little to wait for.
Each pipeline's pieces are then packed by the run's packing, which knows the pipeline alone. Times
are simulated then: of both dealings the one stays whose latest pipeline ends first, and what each
pipeline takes beside its predicted costs corrects these for another dealing, while that helps.

No piece is shared between pipelines. When parameters are there, and gradients where they rest, the
receivers' predictors say (:mod:`~lightning_wlb.prediction.linking`).

Cost: two to four times that of a packing's plan on each pipeline, and of Algorithm 1; pipelines
that are alike and get the same pieces again are planned once. Not without a device profile: exact
work does not know which pipeline is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import ActivationCheckpointing, Piece, ReplicaPlan, Scheme
from lightning_wlb.planning.dealing import TRIALS, Costs, deal_greedily
from lightning_wlb.planning.judge import PredictedJudge
from lightning_wlb.planning.laying_out import laid_out, to_be_laid_out
from lightning_wlb.planning.longest_first import longest_first
from lightning_wlb.planning.packing.base import Packer, Placement, Rules
from lightning_wlb.prediction.document import document_ns
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import MODES
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.sharding import ADAPTIVE

Shape = tuple[tuple[int, ...], int, int]
""":attr:`.Scheme.shape`: what pipelines that are alike have in common."""

DEALT_AGAIN = 2
"""Times at most that pieces are dealt again, knowing what pipelines took."""


def mesh_of(scheme: Scheme) -> Mesh:
    """The mesh of a pipeline alone."""
    return Mesh(1, len(scheme.stages), scheme.context, scheme.tensor)


@dataclass(frozen=True, eq=False)
class Receiver:
    """What pipelines of one kind can do; pieces are dealt to them.

    Args:
        scheme: of such a pipeline, on any ranks.
        predictor: of the model on a mesh of pipelines that are all like this one, as many as there
            are ranks for: over so many what is at rest is spread.
        activation_checkpointing: of all micro-batches; ``"auto"``: the least that fits.
        sharding: of every micro-batch.

    Raises:
        ValueError: the predictor is of another mesh or of other stages.
    """

    scheme: Scheme
    predictor: Predictor
    activation_checkpointing: ActivationCheckpointing = "auto"
    sharding: str = ADAPTIVE

    def __post_init__(self) -> None:
        mesh, stages = self.predictor.latency.mesh, self.predictor.stages
        if replace(mesh, data=1) != mesh_of(self.scheme) or stages != self.scheme.layers:
            raise ValueError(
                f"the predictor is of the mesh {mesh} with stages of {[*map(len, stages)]} layers,"
                f" not of the pipeline on {self.scheme}."
            )

    @cached_property
    def judge(self) -> PredictedJudge:
        """Simulates the pipeline."""
        return PredictedJudge(self.predictor, self.activation_checkpointing)

    @cached_property
    def place(self) -> Placement:
        """What the pipeline's pieces are arranged for."""
        slices = SCHEDULES[self.predictor.schedule].slices
        return Placement(mesh_of(self.scheme), to_be_laid_out(self.sharding), self.judge, slices)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest piece that the pipeline can hold; 0 if none."""
        return max(self.judge.longest, default=0)

    def costs(self, tokens: Sequence[int]) -> list[int | None]:
        """Of pieces: ns of forward and backward on one stage; None of those that do not fit.

        Predicted for half-powers of two from 64 on, and interpolated between them for each token.
        """
        grid, times = self._predicted
        per_token = np.interp(tokens, grid, times / grid)
        return [
            round(length * each) if length <= self.longest else None
            for length, each in zip(tokens, per_token.tolist(), strict=True)
        ]

    @cached_property
    def _predicted(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Lengths, and what a piece of each takes."""
        given = self.activation_checkpointing
        modes = MODES if given == "auto" else (given,)
        limits = [(self.predictor.longest_micro_batch(1, mode), mode) for mode in modes]
        grid = (2 ** (np.arange(12, 2 * self.longest.bit_length()) / 2)).astype(np.int64)
        grid = np.append(grid[grid < self.longest], max(self.longest, 1))
        times = [
            document_ns(
                self.predictor,
                length,
                next((mode for most, mode in limits if most >= length), modes[-1]),
            )
            for length in grid.tolist()
        ]
        return grid, np.array(times)

    def plan(self, pieces: Sequence[Piece], packer: Packer) -> ReplicaPlan:
        """What the pipeline does with some pieces, as replica 0 of a mesh of its own."""
        (made,) = packer.replicas([list(pieces)], self.place)
        cost = self.predictor.latency.segment_cost
        (made,) = self.judge.settled(laid_out([made], self.place.mesh, self.sharding, cost))
        return made


class Arranged(NamedTuple):
    """A step on pipelines that differ.

    Attributes:
        excess: bytes by which the fullest device overflows; 0 if all fit.
        time_ns: of the pipeline that takes longest, until its gradients have arrived.
        replicas: of each pipeline.
        cap: most tokens that a micro-batch may have.
    """

    excess: int
    time_ns: int
    replicas: tuple[ReplicaPlan, ...]
    cap: int


def check_packing(packer: Packer | type[Packer]) -> None:
    """Refuse a packing that cannot be used with pipelines that differ.

    Raises:
        ValueError: it makes micro-batches for all pipelines at once.
    """
    if not packer.arranges:
        raise ValueError(
            "pipelines that differ cannot share the micro-batches of this packing, which are made"
            " before they are dealt. Use packing='auto', 'slim' or 'hydraulis'."
        )


def arrange(
    pieces: Sequence[Piece],
    strategy: Sequence[Scheme],
    kinds: Mapping[Shape, Receiver],
    rules: Rules,
    packer: Callable[[Rules], Packer],
    trials: int = TRIALS,
) -> Arranged:
    """Deal the pieces of a step and pack them, for the shortest simulated step.

    Args:
        pieces: of the step.
        strategy: the pipelines.
        kinds: by shape, for every pipeline of the strategy.
        rules: of the run. A pipeline's share of the micro-batches is that of its ranks.
        packer: makes the packing that arranges a pipeline's pieces.
        trials: of Algorithm 1.

    Raises:
        ValueError: a piece that no pipeline can hold, or a packing whose micro-batches are made for
            all pipelines at once.
    """
    check_packing(packer(rules))
    order = longest_first(pieces)
    lengths = [piece.tokens for piece in order]
    receivers = [kinds[scheme.shape] for scheme in strategy]
    by_kind = {each: each.costs(lengths) for each in receivers}
    ranks = sum(scheme.size for scheme in strategy)
    share = {each: max(rules.micro_batches * each.scheme.size // ranks, 1) for each in by_kind}
    packers = {each: packer(replace(rules, micro_batches=count)) for each, count in share.items()}
    planned: dict[tuple[Receiver, tuple[int, ...]], tuple[int, int, int, ReplicaPlan]] = {}

    def simulated(each: Receiver, own: Sequence[int]) -> tuple[int, int, int, ReplicaPlan]:
        """Excess, time, end of the last action, and plan of a pipeline."""
        key = each, tuple(own)
        if key not in planned:
            plan = each.plan([order[index] for index in own], packers[each])
            verdict = each.judge([plan])
            excess = max(verdict.peak - each.judge.limit, 0)
            planned[key] = excess, verdict.time, max(each.judge.ends([plan])), plan
        return planned[key]

    def tried(dealt: Sequence[Sequence[int]]) -> _Tried:
        made = [
            simulated(each, own) if own else (0, 0, 0, ReplicaPlan((), (), ()))
            for each, own in zip(receivers, dealt, strict=True)
        ]
        excesses, times, ends, plans = zip(*made, strict=True)
        return _Tried(max(excesses), max(times), dealt, ends, plans)

    costs: Costs = list(zip(*(by_kind[each] for each in receivers), strict=True))
    depths = [len(scheme.stages) for scheme in strategy]
    best = min(
        tried(deal_greedily(costs, stages, trials)) for stages in (depths, [1] * len(depths))
    )
    for _ in range(DEALT_AGAIN):
        again = tried(deal_greedily(_corrected(costs, best), [1] * len(depths), trials))
        if again[:2] >= best[:2]:
            break
        best = again
    cap = max(packers[each].cap(each.place) for each in by_kind)
    replicas = tuple(_numbered(plan, number) for number, plan in enumerate(best.plans))
    return Arranged(best.excess, best.time_ns, replicas, cap)


class _Tried(NamedTuple):
    """A dealing, and what each pipeline makes of it."""

    excess: int
    time_ns: int
    dealt: Sequence[Sequence[int]]
    ends: Sequence[int]
    plans: Sequence[ReplicaPlan]


def _corrected(costs: Costs, tried: _Tried) -> Costs:
    """Costs on each pipeline so that those of its pieces add up to what it took."""
    factors = []
    for pipeline, (own, end) in enumerate(zip(tried.dealt, tried.ends, strict=True)):
        predicted = sum(costs[index][pipeline] or 0 for index in own)
        factors.append(end / predicted if predicted else 1.0)
    return [
        [None if cost is None else round(cost * f) for cost, f in zip(each, factors, strict=True)]
        for each in costs
    ]


def _numbered(plan: ReplicaPlan, number: int) -> ReplicaPlan:
    """The plan as that of another replica."""
    forward, backward = (
        tuple(replace(each, replicas=(number,)) for each in micro_batches)
        for _, micro_batches in plan.passes
    )
    return ReplicaPlan(plan.slices, forward, backward)
