"""What the prediction of a step consists of: its simulation, and figures derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import Recompute, ReplicaPlan, StepPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.simulator import Simulation

MODES: tuple[Recompute, ...] = get_args(Recompute)
"""What a micro-batch may recompute, the least first."""


class PassTimes(NamedTuple):
    """Times of a micro-batch on its context-parallel group; pairs are (forward, backward).

    Attributes:
        attention_ns: of one layer, on the slowest rank; where layers differ, their mean.
        mean_attention_ns: of one layer, mean over the ranks; where layers differ, their mean.
        layer_ns: everything of a layer of each kind (``ModelShape.kinds``), on the slowest rank,
            communication included.
    """

    attention_ns: tuple[int, int]
    mean_attention_ns: tuple[float, float]
    layer_ns: tuple[tuple[int, int], ...]


class MicroBatchCost(NamedTuple):
    """One micro-batch on its context-parallel group.

    Attributes:
        rows: of each rank, padding included.
        keys: most that a rank's segments read.
        indexed: how many of these keys are put in order by an index.
        kept_rows: rows whose keys and values later slices read; 0 if none do.
        by_mode: times with each recomputation, in the order of :data:`MODES`.
        recompute: the one of the plan; ``_replace`` gives the cost with another.
        segments: of attention, on the rank that has most.
    """

    rows: int
    keys: int
    indexed: int
    kept_rows: int
    by_mode: tuple[PassTimes, ...]
    recompute: Recompute = "none"
    segments: int = 1

    @property
    def attention_ns(self) -> tuple[int, int]:
        """See :class:`.PassTimes`."""
        return self._times.attention_ns

    @property
    def mean_attention_ns(self) -> tuple[float, float]:
        """See :class:`.PassTimes`."""
        return self._times.mean_attention_ns

    @property
    def layer_ns(self) -> tuple[tuple[int, int], ...]:
        """See :class:`.PassTimes`."""
        return self._times.layer_ns

    @property
    def _times(self) -> PassTimes:
        return self.by_mode[MODES.index(self.recompute)]


class PreparedReplicas(NamedTuple):
    """What is known of the steps of some replicas before they are simulated.

    Attributes:
        executed: the replicas as they are executed (``prediction.executed``).
        costs: of each replica's micro-batches.
        programs: of each replica's ranks.
        freed: of each replica, see :meth:`.StepMemory.freed`.
    """

    executed: list[ReplicaPlan]
    costs: list[list[MicroBatchCost]]
    programs: list[list[list[Action]]]
    freed: list[Mapping[Action, int]]


class SimulatedReplicas(NamedTuple):
    """The steps of some replicas.

    Attributes:
        costs: of each replica's micro-batches.
        durations: of each replica, how long each action computes, in ns.
        programs: of each replica's ranks.
        simulations: one for each replica.
        peak_bytes: of the fullest rank, state included.
    """

    costs: list[list[MicroBatchCost]]
    durations: list[dict[Action, int]]
    programs: list[list[list[Action]]]
    simulations: list[Simulation]
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A simulated step.

    Args:
        plan: what was simulated.
        simulations: one for each replica.
        costs: of each replica's micro-batches, in forward order.
        work_ns: int64 [replicas, micro-batches], forward + backward of each over all stages,
            on its slowest context rank; 0 where a replica has fewer.
        peak_bytes: of the fullest rank, state included.
        flops: model FLOPs of the step, recomputation left out.
        devices: of the mesh.
        peak_flops: FLOP/s of one device's data sheet.
    """

    plan: StepPlan
    simulations: tuple[Simulation, ...]
    costs: tuple[tuple[MicroBatchCost, ...], ...]
    work_ns: npt.NDArray[np.int64]
    peak_bytes: int
    flops: int
    devices: int
    peak_flops: float

    @staticmethod
    def of(plan: StepPlan, step: SimulatedReplicas, latency: LatencyModel) -> StepPrediction:
        """The step of all replicas of a plan, of the model on the run's mesh."""
        most = max(map(len, step.costs), default=0)
        work = np.zeros((len(step.costs), most), dtype=np.int64)
        for number, durations in enumerate(step.durations):
            for action, duration in durations.items():
                work[number, action.micro_batch] += duration
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
        )

    @property
    def total_ns(self) -> int:
        """The step time: that of the latest replica."""
        return max(simulation.total_ns for simulation in self.simulations)

    @property
    def abreast(self) -> tuple[int, ...]:
        """Of each replica, the ranks that work side by side on a stage: context × tensor."""
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
        """Attention of all micro-batches if all ranks take as long as the slowest, and as it is.

        Of one layer, forward and backward, summed over the ranks of each replica that hold it.
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
