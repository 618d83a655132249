"""What the prediction of a step consists of: its simulation, and figures derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import waited_ns
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.micro_batch import MicroBatchCost
from lightning_wlb.schedule.simulator import Simulation


class SimulatedReplicas(NamedTuple):
    """The simulated steps of some replicas.

    Attributes:
        costs: [replicas][micro-batches].
        simulations: one for each replica.
        peak_bytes: on the fullest rank, state included.
    """

    costs: list[list[MicroBatchCost]]
    simulations: list[Simulation]
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A simulated step.

    Args:
        plan: what was simulated.
        simulations: one for each replica.
        costs: [replicas][micro-batches in forward order].
        work_ns: int64 [replicas, micro-batches], forward + backward of each over all stages,
            on its slowest context rank; 0 where a replica has fewer.
        peak_bytes: on the fullest rank, state included.
        flops: model FLOPs of the step, recomputation left out.
        devices: number of devices of the mesh.
        peak_flops: FLOP/s of one device's data sheet.
        waited_ns: see :func:`~lightning_wlb.cost.overlap.waited_ns`.
    """

    plan: StepPlan
    simulations: tuple[Simulation, ...]
    costs: tuple[tuple[MicroBatchCost, ...], ...]
    work_ns: npt.NDArray[np.int64]
    peak_bytes: int
    flops: int
    devices: int
    peak_flops: float
    waited_ns: tuple[int, int]

    @staticmethod
    def of(plan: StepPlan, step: SimulatedReplicas, latency: LatencyModel) -> StepPrediction:
        """Sum up the simulation of all replicas of a plan, of the model on the run's mesh."""
        most = max(map(len, step.costs), default=0)
        work = np.zeros((len(step.costs), most), dtype=np.int64)
        for number, simulation in enumerate(step.simulations):
            for action, begin, end in chain.from_iterable(simulation.spans):
                work[number, action.micro_batch] += end - begin
        total = Work.of(latency.shape).total
        return StepPrediction(
            plan=plan,
            simulations=tuple(step.simulations),
            costs=tuple(map(tuple, step.costs)),
            work_ns=work,
            peak_bytes=step.peak_bytes,
            flops=sum(total(piece.tokens) for piece in plan.pieces),
            devices=latency.mesh.devices,
            peak_flops=latency.profile.peak_flops,
            waited_ns=waited_ns(latency, (cost.rows for of in step.costs for cost in of)),
        )

    @property
    def total_ns(self) -> int:
        """The step time, which is that of the latest replica."""
        return max(simulation.total_ns for simulation in self.simulations)

    @property
    def abreast(self) -> tuple[int, ...]:
        """For each replica, the ranks that work side by side on a stage: context × tensor."""
        if self.plan.schemes:
            return tuple(scheme.context * scheme.tensor for scheme in self.plan.schemes)
        pipeline = len(self.simulations[0].spans)
        count = len(self.simulations)
        return (self.devices // pipeline // count,) * count

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time from a replica's first action to the last one."""
        each = list(zip(self.abreast, self.simulations, strict=True))
        idle = sum(ranks * sum(simulation.idle_ns) for ranks, simulation in each)
        whole = idle + sum(ranks * sum(simulation.busy_ns) for ranks, simulation in each)
        return idle / whole if whole else 0.0

    @property
    def context_ns(self) -> tuple[float, float]:
        """Attention time if every rank took as long as the slowest, and attention time as it is.

        Both are of one layer, forward and backward, summed over micro-batches and over the ranks
        that hold that layer.
        """
        every = [
            (ranks, cost)
            for ranks, of_replica in zip(self.abreast, self.costs, strict=True)
            for cost in of_replica
        ]
        return (
            float(sum(ranks * sum(cost.attention_ns) for ranks, cost in every)),
            sum(ranks * sum(cost.mean_attention_ns) for ranks, cost in every),
        )
