"""A few strategies, of which each step takes the one that is simulated to be fastest.

The mesh's own pipelines are always among them: a step leaves them only where another strategy is
simulated to be faster by :data:`WORTH_PER_MILLE`, or fits in memory where they do not. So no step
is predicted to take longer than it would on the mesh. What the change costs is in the account:
parameters travel to the strategy's pipelines, and gradients back, as :mod:`.exchange_times` has it,
as far as actions do not hide them.

Which pieces are in a step does not depend on the strategy, and which strategy it takes depends on
nothing but these pieces. So a run that is resumed with the same pool, on the same mesh, makes the
same choices, and its state holds nothing of them.

Cost: for each strategy that of :func:`.dealing.arrange`, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.heterogeneous.planning.dealing import Arranged, Receiver, arrange
from lightning_wlb.heterogeneous.planning.exchange_times import exchange_traffic
from lightning_wlb.plan import (
    ActivationCheckpointing,
    Piece,
    ReplicaPlan,
    Schemes,
    Shape,
    StepPlan,
    alike,
    schemes_of,
)
from lightning_wlb.planning.packing.base import Packer, Rules
from lightning_wlb.planning.plan_scoring import PlanScore
from lightning_wlb.planning.step_chooser import ChosenStep
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import SimulatedReplicas, StepPrediction
from lightning_wlb.sharding import ADAPTIVE, HEADS, check_heads

WORTH_PER_MILLE = 5
"""Simulated gain for which a step leaves the mesh."""

Kinds = Mapping[Shape, Receiver]
"""What the pipelines of each shape can do."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Strategies to choose from, beside the mesh's own.

    Args:
        kinds: for each strategy those of its pipelines.

    Raises:
        ValueError: there is no strategy, or a pipeline of a shape that is not among the kinds.
    """

    kinds: Mapping[Schemes, Kinds]

    def __post_init__(self) -> None:
        if not self.kinds or not all(self.kinds):
            raise ValueError("a pool without a strategy, or one without a pipeline. Give some.")
        for strategy, kinds in self.kinds.items():
            for scheme in strategy:
                if scheme.shape not in kinds:
                    raise ValueError(f"a pool without a predictor for the pipeline on {scheme}.")

    @staticmethod
    def of(
        strategies: Sequence[Schemes],
        base: Predictor,
        activation_checkpointing: ActivationCheckpointing = "auto",
        sharding: str = ADAPTIVE,
    ) -> Pool:
        """The pool of a run.

        Args:
            strategies: of each its pipelines, on consecutive ranks.
            base: of the run's mesh, where parameters rest.
            activation_checkpointing: of all micro-batches; ``"auto"``: the least that fits.
            sharding: of every micro-batch.

        Raises:
            ValueError: there is no strategy, or one is the mesh's, is for other ranks or layers,
                lies across nodes as no mesh does, or has context ranks over which the sharding
                cannot spread the model's heads.
        """
        made: dict[Schemes, Kinds] = {}
        for strategy in strategies:
            _check(strategy, base)
            if sharding == HEADS:
                _check_heads(strategy, base)
            traffic = {
                scheme.shape: each for scheme, each in exchange_traffic(base, strategy).items()
            }
            made[strategy] = {
                shape: Receiver(
                    scheme,
                    replace(
                        base,
                        latency=replace(
                            base.latency,
                            mesh=scheme.mesh(max(base.latency.mesh.devices // scheme.size, 1)),
                        ),
                        stages=scheme.layers,
                        linked=traffic[shape],
                    ),
                    activation_checkpointing,
                    sharding,
                    len(numbers),
                )
                for shape, numbers in alike(strategy).items()
                for scheme in [strategy[numbers[0]]]
            }
        return Pool(made)

    def only(self, strategies: Sequence[Schemes]) -> Pool:
        """The pool of some of its strategies."""
        return Pool({each: self.kinds[each] for each in strategies})

    def arranged(
        self,
        pieces: Sequence[Piece],
        rules: Rules,
        packer: Callable[[Rules], Packer],
    ) -> dict[Schemes, Arranged]:
        """A step on each strategy that can hold its longest piece."""
        longest, packing = max(piece.tokens for piece in pieces), packer(rules)
        return {
            strategy: arrange(pieces, strategy, kinds, rules, packer)
            for strategy, kinds in self.kinds.items()
            if max(each.longest_shared(packing) for each in kinds.values()) >= longest
        }

    def predict(self, plan: StepPlan, base: Predictor) -> StepPrediction:
        """The simulated step of a plan with one of the strategies; ``base`` is of the mesh."""
        kinds = self.kinds[plan.schemes].items()
        predictors = {shape: receiver.predictor for shape, receiver in kinds}
        return predict_elsewhere(plan, predictors, base.latency)

    def choose(
        self,
        pieces: Sequence[Piece],
        rules: Rules,
        packer: Callable[[Rules], Packer],
        on_mesh: PlanScore,
        limit: int,
    ) -> ChosenStep | None:
        """The strategy of a step; None for the mesh's own.

        Args:
            pieces: of the step.
            rules: of the run.
            packer: makes the run's packing.
            on_mesh: the step on the mesh.
            limit: bytes of a device that may be filled.
        """
        return best_of(self.arranged(pieces, rules, packer), on_mesh, limit)


def best_of(
    arranged: Mapping[Schemes, Arranged], on_mesh: PlanScore, limit: int
) -> ChosenStep | None:
    """The first of the fastest strategies, if it is worth leaving the mesh for.

    Args:
        arranged: the step on each of them.
        on_mesh: the step on the mesh.
        limit: bytes of a device that may be filled.
    """
    best: ChosenStep | None = None
    least = max(on_mesh.peak - limit, 0), on_mesh.time * (1000 - WORTH_PER_MILLE) // 1000
    for strategy, each in arranged.items():
        if each[:2] < least:
            least = each[:2]
            best = ChosenStep(strategy, each.time_ns, each.replicas, each.cap)
    return best


def _check(strategy: Schemes, base: Predictor) -> None:
    """Refuse a strategy that cannot be chosen, see :meth:`Pool.of`."""
    mesh, profile = base.latency.mesh, base.latency.profile
    ranks = sum(scheme.size for scheme in strategy)
    if ranks != mesh.devices:
        raise ValueError(
            f"a strategy for {ranks} ranks, the mesh has {mesh.devices}. Give each rank a"
            " place in one of its pipelines."
        )
    if strategy == schemes_of(mesh, base.stages):
        raise ValueError(
            f"a strategy that is the mesh's own, {strategy[0]} and so on, which every step"
            " may take anyway. Leave it out."
        )
    per_node, layers = profile.devices_per_node, base.latency.shape.layers
    for scheme in strategy:
        if sum(scheme.stages) != layers:
            raise ValueError(
                f"the pipeline on {scheme} has {sum(scheme.stages)} layers, the model"
                f" {layers}. Give each layer a stage."
            )
        # Whether ranks share a node is predicted for pipelines that begin at multiples of their
        # size, or with a node.
        begins = scheme.first % scheme.size and scheme.first % per_node
        if begins and scheme.first // per_node != (scheme.ranks.stop - 1) // per_node:
            raise ValueError(
                f"the pipeline on {scheme} lies across nodes of {per_node} devices. Put"
                " larger pipelines first."
            )


def _check_heads(strategy: Schemes, base: Predictor) -> None:
    for scheme in strategy:
        for layer in base.latency.shape.kinds if scheme.context > 1 else ():
            check_heads(layer.heads, layer.kv_heads, scheme.context, scheme.tensor)


def predict_elsewhere(
    plan: StepPlan,
    predictors: Mapping[Shape, Predictor],
    latency: LatencyModel,
) -> StepPrediction:
    """The simulated step of a plan that has a strategy.

    Args:
        plan: of the step.
        predictors: by :attr:`.Scheme.shape`, for every pipeline of the strategy.
        latency: of the model on the run's mesh.
    """
    peak = 0
    found: dict[int, tuple[Any, ...]] = {}
    for shape, group in alike(plan.schemes).items():
        step = predictors[shape].simulate([among(plan.replicas[number], group) for number in group])
        found |= dict(zip(group, zip(*step[:-1], strict=True), strict=True))
        peak = max(peak, step.peak_bytes)
    every = zip(*(found[number] for number in range(len(plan.replicas))), strict=True)
    costs, durations, programs, simulations = map(list, every)
    step = SimulatedReplicas(costs, durations, programs, simulations, peak)
    return StepPrediction.of(plan, step, latency)


def among(replica: ReplicaPlan, group: Sequence[int]) -> ReplicaPlan:
    """The plan of one of a group of pipelines, in which they are numbered as in the group."""
    forward, backward = (
        tuple(
            replace(each, replicas=tuple(map(group.index, each.replicas))) for each in micro_batches
        )
        for _, micro_batches in replica.passes
    )
    return ReplicaPlan(replica.slices, forward, backward)
