"""The first steps of a run on one mesh, planned and simulated: what meshes are compared by.

The same planner as in training plans the first steps of the run, from the same documents in the
same order; what enters a step knows no mesh, so all meshes train on the same pieces. Plans are
chosen by the device profile, as in training with a profile, or by exact work, which is many times
as fast and ranks meshes much alike. Either way the profile predicts what the steps take.

Cost: that of planning ``request.steps`` steps and of simulating each once; by profile ``auto``
simulates five to ten plans of each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.meshes.choice import MeshRow
from lightning_wlb.meshes.request import MeshRequest
from lightning_wlb.planning.judge import PredictedJudge
from lightning_wlb.planning.planner import Planner, plan_steps
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction

LOSSES = (
    "pipeline bubble",
    "gathering parameters",
    "tensor-parallel communication",
    "attention imbalance",
    "exchange of keys",
)
"""What ranks spend time on beside arithmetic; the bubble includes waits for slower replicas."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The first steps of a run on a mesh.

    Args:
        row: their figures.
        fits: whether they stay within the device's memory.
        steps: the predicted steps.
    """

    row: MeshRow
    fits: bool
    steps: tuple[StepPrediction, ...]

    @property
    def order(self) -> tuple[bool, int, tuple[int, ...]]:
        """For sorting: meshes that fit first, by time; of equals those with most replicas.

        All meshes of a request train on the same pieces, so times compare as they are.
        """
        mesh = self.row.mesh
        sizes = tuple(-size for size in mesh.shape)
        return not self.fits, self.row.steps_ns, (*sizes, mesh.virtual_stages)


def evaluate(request: MeshRequest, mesh: Mesh, *, by_profile: bool = True) -> Evaluation:
    """Plan and simulate the first steps of the run on a mesh.

    Args:
        request: documents, model, settings and device.
        mesh: with its virtual stages.
        by_profile: whether plans are chosen by the device profile; else by exact work.

    Returns:
        With the least activation checkpointing that fits in memory, or with the most if none does.

    Raises:
        ValueError: a mesh that the model or the schedule cannot run on.
    """
    plans = None
    for recompute in request.modes:
        predictor = request.predictor(mesh, recompute)
        if plans is None or by_profile:
            plans = plan_steps(_planner(request, predictor, by_profile), request.steps)
        steps = tuple(map(predictor.predict, plans))
        peak = max(step.peak_bytes for step in steps)
        if peak <= request.usable_bytes:
            break
    row = MeshRow(
        mesh=mesh,
        schedule=predictor.schedule,
        recompute=recompute,
        recomputed=float(recompute != "none"),
        by_profile=by_profile,
        steps_ns=sum(step.total_ns for step in steps),
        steps=len(steps),
        tokens=sum(step.plan.tokens for step in steps),
        flops=sum(step.flops for step in steps),
        peak_bytes=peak,
        shares=_shares(predictor, steps),
    )
    return Evaluation(row, peak <= request.usable_bytes, steps)


def _planner(request: MeshRequest, predictor: Predictor, by_profile: bool) -> Planner:
    return Planner(
        request.lengths,
        request.data,
        Work.of(request.shape),
        predictor.latency.mesh,
        sharding=request.sharding,
        schedule=predictor.schedule,
        kernel_cost=predictor.latency.segment_cost,
        judge=PredictedJudge(predictor) if by_profile else None,
        mixture=request.mixture,
    )


def _shares(predictor: Predictor, steps: Iterable[StepPrediction]) -> dict[str, float]:
    """Of the time of all pipeline ranks, what is spent on each of :data:`LOSSES`."""
    latency, layers = predictor.latency, predictor.latency.shape.layers
    spent = dict.fromkeys(LOSSES, 0.0)
    whole = 0
    for step in steps:
        ranks = latency.mesh.pipeline * latency.mesh.data
        whole += ranks * step.total_ns
        spent["pipeline bubble"] += sum(sum(each.idle_ns) for each in step.simulations)
        spent["gathering parameters"] += ranks * step.simulations[0].synchronisation_ns
        for cost in (cost for of_replica in step.costs for cost in of_replica):
            for backward in (False, True):
                tensor = latency.tensor_parallel_ns(cost.rows, backward=backward)
                attention = cost.attention_ns[backward]
                linear, layer = 0, 0
                for kind, count, both in zip(
                    latency.kinds, latency.shape.kinds.values(), cost.layer_ns, strict=True
                ):
                    linear += count * kind.linear_ns(cost.rows, backward=backward)
                    layer += count * both[backward]
                uneven = layers * (attention - cost.mean_attention_ns[backward])
                spent["tensor-parallel communication"] += layers * tensor
                spent["attention imbalance"] += uneven
                spent["exchange of keys"] += layer - linear - layers * (tensor + attention)
    return {name: spent[name] / whole for name in LOSSES}
