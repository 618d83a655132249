"""The prediction of a step: its simulation, and figures derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """The simulated steps of some replicas."""

    costs: list[list[MicroBatchCost]]  #: [replicas][micro-batches in forward order]
    simulations: list[Simulation]  #: one for each replica
    peak_bytes: int  #: most bytes on a rank, state included


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A simulated step: its plan as :class:`SimulatedReplicas`, and the run's latency model."""

    plan: StepPlan
    latency: LatencyModel
    costs: Sequence[Sequence[MicroBatchCost]]
    simulations: Sequence[Simulation]
    peak_bytes: int

    @cached_property
    def work_ns(self) -> npt.NDArray[np.int64]:
        """Forward + backward of each micro-batch over all stages, on its slowest context rank.

        int64 [replicas, micro-batches], padded with 0 for replicas with fewer micro-batches.
        """
        most = max(map(len, self.costs), default=0)
        work = np.zeros((len(self.costs), most), dtype=np.int64)
        for number, simulation in enumerate(self.simulations):
            for action, begin, end in chain.from_iterable(simulation.spans):
                work[number, action.micro_batch] += end - begin
        return work

    @cached_property
    def flops(self) -> int:
        """Model FLOPs of the step, without recomputation."""
        total = Work.of(self.latency.shape).total
        return sum(total(piece.tokens) for piece in self.plan.pieces)

    @cached_property
    def waited_ns(self) -> tuple[int, int]:
        """See :func:`~lightning_wlb.cost.overlap.waited_ns`."""
        return waited_ns(self.latency, (cost.rows for of in self.costs for cost in of))

    @property
    def total_ns(self) -> int:
        """The step time, up to the end of the latest replica."""
        return max(simulation.total_ns for simulation in self.simulations)

    @property
    def abreast(self) -> tuple[int, ...]:
        """For each replica, the ranks that work side by side on a stage: context × tensor."""
        if self.plan.schemes:
            return tuple(scheme.context * scheme.tensor for scheme in self.plan.schemes)
        mesh = self.latency.mesh
        return (mesh.context * mesh.tensor,) * len(self.simulations)

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time from each replica's first action to the last of all."""
        each = list(zip(self.abreast, self.simulations, strict=True))
        idle = sum(ranks * sum(simulation.idle_ns) for ranks, simulation in each)
        whole = idle + sum(ranks * sum(simulation.busy_ns) for ranks, simulation in each)
        return idle / whole if whole else 0.0

    @property
    def context_ns(self) -> tuple[float, float]:
        """Attention time if every rank took as long as the slowest, and the actual attention time.

        Both are of one layer forward and backward, summed over micro-batches and the layer's ranks.
        """
        every = [
            (ranks, cost)
            for ranks, of_replica in zip(self.abreast, self.costs, strict=True)
            for cost in of_replica
        ]
        return (
            float(sum(ranks * sum(cost.times.attention_ns) for ranks, cost in every)),
            sum(ranks * sum(cost.times.mean_attention_ns) for ranks, cost in every),
        )
