"""What the prediction of a step consists of: its simulation, and figures derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_wlb.plan import StepPlan
from lightning_wlb.schedule.simulate import Simulation


class MicroBatchCost(NamedTuple):
    """One micro-batch on its context-parallel group; pairs are (forward, backward).

    Attributes:
        rows: of each rank, padding included.
        keys: most that a rank's segments read.
        indexed: how many of these keys are put in order by an index.
        kept_rows: rows whose keys and values later slices read; 0 if none do.
        attention_ns: of one layer, on the slowest rank; where layers differ, their mean.
        mean_attention_ns: of one layer, mean over the ranks; where layers differ, their mean.
        layer_ns: everything of a layer of each kind (``ModelShape.kinds``), on the slowest rank,
            communication included.
    """

    rows: int
    keys: int
    indexed: int
    kept_rows: int
    attention_ns: tuple[int, int]
    mean_attention_ns: tuple[float, float]
    layer_ns: tuple[tuple[int, int], ...]


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

    @property
    def total_ns(self) -> int:
        """The step time."""
        return self.simulations[0].total_ns

    @property
    def bubble(self) -> float:
        """Idle share of the pipeline ranks' time before synchronisation."""
        ranks = [idle for simulation in self.simulations for idle in simulation.idle_ns]
        whole = self.simulations[0].compute_ns * len(ranks)
        return sum(ranks) / whole if whole else 0.0

    @property
    def context_ns(self) -> tuple[float, float]:
        """Attention of all micro-batches on the slowest context rank, and on the mean rank."""
        every = [cost for of_replica in self.costs for cost in of_replica]
        return (
            float(sum(sum(cost.attention_ns) for cost in every)),
            sum(sum(cost.mean_attention_ns) for cost in every),
        )
