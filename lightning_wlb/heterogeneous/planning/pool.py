"""A few choices of pipelines; each step takes the one with the shortest simulated time.

A step leaves the mesh's own pipelines only if others are simulated to be faster by
:data:`.WORTH_PER_MILLE`, or if only they have enough memory. So a step that fits on the mesh is
never predicted to take longer elsewhere. The simulated times include the exchange of parameters and
gradients (:mod:`.exchange_times`), as far as actions do not hide it.

The pieces of a step do not depend on its pipelines, and its pipelines depend only on these pieces,
so checkpoints need not hold the choices.

Cost: :func:`.arrange` for each choice, in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_wlb.heterogeneous.planning.dealing import Kinds, PipelineKind, arrange, renumbered
from lightning_wlb.heterogeneous.planning.exchange_times import exchange_traffic
from lightning_wlb.plan import (
    ActivationCheckpointing,
    Piece,
    Schemes,
    Shape,
    StepPlan,
    alike,
    schemes_of,
)
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.step_chooser import PlannedStep
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction
from lightning_wlb.sharding import ADAPTIVE


@dataclass(frozen=True, eq=False)
class Pool:
    """Pipelines to choose from, beside the mesh's own: a :class:`.StepChooser`.

    ``kinds`` has, for each choice, the kinds of its pipelines.
    """

    kinds: Mapping[Schemes, Kinds]

    @staticmethod
    def of(
        choices: Sequence[Schemes],
        base: Predictor,
        activation_checkpointing: ActivationCheckpointing = "auto",
        sharding: str = ADAPTIVE,
    ) -> Pool:
        """The pool of a run.

        Args:
            choices: the pipelines of each choice, on all ranks of the mesh.
            base: predicts steps on the run's mesh, over which parameters are sharded.
            activation_checkpointing: as for :class:`.ProfileScorer`.
            sharding: as for :class:`.PipelineKind`.

        Raises:
            ValueError: a choice is the mesh's own, or its pipelines cross nodes as no mesh's do.
        """
        made: dict[Schemes, Kinds] = {}
        for schemes in choices:
            _check(schemes, base)
            traffic = exchange_traffic(base, schemes)
            kinds: dict[Shape, PipelineKind] = {}
            for shape, numbers in alike(schemes).items():
                scheme = schemes[numbers[0]]
                # Parameters are sharded over all ranks, as if all pipelines were like this one.
                mesh = scheme.mesh(max(base.latency.mesh.devices // scheme.size, 1))
                predictor = replace(
                    base,
                    latency=replace(base.latency, mesh=mesh),
                    stages=scheme.layers,
                    linked=traffic[scheme],
                )
                scorer = ProfileScorer(predictor, activation_checkpointing)
                kinds[shape] = PipelineKind(scheme, scorer, sharding, len(numbers))
            made[schemes] = kinds
        return Pool(made)

    def arranged(self, pieces: Sequence[Piece], packer: Packer) -> list[PlannedStep]:
        """A step on each choice that can hold its longest piece."""
        longest = max(piece.tokens for piece in pieces)
        return [
            arrange(pieces, schemes, kinds, packer)
            for schemes, kinds in self.kinds.items()
            if max(each.longest_shared(packer) for each in kinds.values()) >= longest
        ]

    def predict(self, plan: StepPlan, base: Predictor) -> StepPrediction:
        """The simulated step of a plan on one of the choices; ``base`` predicts plans on the mesh.

        Pipelines of equal shape may share micro-batches, so they are simulated together; pipelines
        of different shapes do not wait for each other. The latest pipeline ends the step.
        """
        peak = 0
        found: dict[int, tuple[Any, ...]] = {}
        kinds = self.kinds[plan.schemes]
        for shape, group in alike(plan.schemes).items():
            own = [renumbered(plan.replicas[number], group.index) for number in group]
            step = kinds[shape].scorer.predictor.simulate(own)
            found |= dict(zip(group, zip(step.costs, step.simulations, strict=True), strict=True))
            peak = max(peak, step.peak_bytes)
        every = zip(*(found[number] for number in range(len(plan.replicas))), strict=True)
        costs, simulations = map(list, every)
        return StepPrediction(plan, base.latency, costs, simulations, peak)


def _check(schemes: Schemes, base: Predictor) -> None:
    per_node = base.latency.profile.devices_per_node
    if schemes == schemes_of(base.latency.mesh, base.stages):
        raise ValueError(
            f"the mesh's own strategy, {schemes[0]} and so on, which steps may take. Leave it out."
        )
    for scheme in schemes:
        # Predicted nodes hold for pipelines that begin at a multiple of their size, or with a node.
        begins = scheme.first % scheme.size and scheme.first % per_node
        if begins and scheme.first // per_node != (scheme.ranks.stop - 1) // per_node:
            raise ValueError(
                f"the pipeline on {scheme} spans nodes of {per_node} devices. Put large ones first."
            )
