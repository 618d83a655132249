"""The prediction of a step on pipelines of its own: each as on a mesh of pipelines like it.

Pipelines that are alike may share micro-batches, and are simulated together; those that differ do
not wait for each other. What parameters and gradients take to travel is in their predictors
(:mod:`~lightning_wlb.heterogeneous.link_times`). The step takes as long as its latest pipeline,
the time by which :mod:`~lightning_wlb.heterogeneous.pool` has chosen its strategy.

Cost: that of predicting each pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import ReplicaPlan, Shape, StepPlan, alike
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import SimulatedReplicas, StepPrediction


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
    for shape, group in alike(plan.strategy).items():
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
