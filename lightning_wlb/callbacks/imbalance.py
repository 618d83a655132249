"""From the timings and the plan of one step to its imbalance degrees, as plain numbers.

Every rank times its own actions; gathered from all ranks, the times are one array of seconds.
Three ratios come out of it (docs/design.md, "Imbalance degree"). Each is 1 where the work is even,
and the part of it above 1 is what a perfect balance could save at that level:

* *pipeline*: max·K/Σ of the forward + backward compute of the K micro-batches of all replicas,
  micro-batches left empty included (WLB-LLM §3.1). On each stage and in each pass a micro-batch
  takes as long as the slowest of its context and tensor ranks, which work in step;
* *data*: max/mean of the replicas' totals;
* *context*: Σ max / Σ mean over the context ranks of attention compute, of every micro-batch,
  stage, tensor rank and pass. Attention is timed between collectives: a whole forward includes
  the wait for the slowest rank and takes equally long everywhere.

The first two are also computed from a plan's FLOPs, and all three from a predicted step. A ratio of
sums keeps its two sums (:class:`Level`), so that steps are aggregated by adding them up.

A *timings array* here is float64 seconds [data, pipeline, context, tensor, micro_batches,
2 (forward, backward), 2 (compute, attention)], zero where a replica has no such micro-batch. *Work*
is float64 [data, micro_batches] in any unit, likewise zero there.

Cost: linear in ranks × micro-batches, and in the plan's slices for its FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.step import StepPrediction
from lightning_wlb.schedule.actions import FORWARD
from lightning_wlb.schedule.timeline import Timing

COMPUTE, ATTENTION = 0, 1
"""Last axis of a timings array: what was timed."""


class Level(NamedTuple):
    """An imbalance degree as a quotient.

    ``peak`` is what the step takes if everything waits for the heaviest, ``even`` what it takes
    if the same work is spread evenly; both in the unit of the work.
    """

    peak: float
    even: float

    @property
    def degree(self) -> float:
        """``peak / even``, at least 1; not a number where there was no work."""
        return self.peak / self.even if self.even > 0 else float("nan")


class Imbalance(NamedTuple):
    """The imbalance of one step at each level."""

    pipeline: Level
    data: Level
    context: Level


UNKNOWN = Imbalance(*(Level(float("nan"), float("nan")),) * 3)
"""The imbalance of a step that nothing is known of: every degree is not a number."""


def measured_imbalance(seconds: np.ndarray, slots: int) -> Imbalance:
    """The three levels of a step, from its timings array and K (see :func:`slots`)."""
    work = micro_batch_seconds(seconds)
    return Imbalance(pipeline_level(work, slots), data_level(work), context_level(seconds))


def planned_imbalance(plan: StepPlan, work: Work) -> tuple[Level, Level]:
    """The pipeline and the data level by the FLOPs of the plan."""
    flops = planned_work(plan, work)
    return pipeline_level(flops, slots(plan)), data_level(flops)


def predicted_imbalance(step: StepPrediction) -> Imbalance:
    """The three levels of a predicted step, by its nanoseconds."""
    work = step.work_ns.astype(np.float64)
    return Imbalance(
        pipeline_level(work, slots(step.plan)), data_level(work), Level(*step.context_ns)
    )


def rank_timings(timings: Iterable[Timing], micro_batches: int) -> np.ndarray:
    """One rank's part of a timings array, of a size that every rank knows from the plan.

    Args:
        timings: of one step; micro-batches are numbered in the order of the replica's forward.
        micro_batches: of the replica that has the most in this step.
    """
    seconds = np.zeros((micro_batches, 2, 2))
    for timing in timings:
        passed = 0 if timing.action.kind == FORWARD else 1
        seconds[timing.action.micro_batch, passed] += timing.compute, timing.attention
    return seconds


def on_mesh(seconds: np.ndarray, mesh: Mesh) -> np.ndarray:
    """The timings array from every rank's part, in order of global rank: [ranks, ...]."""
    return seconds.reshape(*mesh.shape, *seconds.shape[1:])


def slots(plan: StepPlan) -> int:
    """K: micro-batches of all replicas, those that the step leaves empty included."""
    return max(plan.micro_batches, sum(len(replica.forward) for replica in plan.replicas))


def micro_batch_seconds(seconds: np.ndarray) -> np.ndarray:
    """The work of a timings array in seconds: what each micro-batch costs its replica."""
    result: np.ndarray = seconds[..., COMPUTE].max(axis=(2, 3)).sum(axis=(1, 3))
    return result


def pipeline_level(work: np.ndarray, slots: int) -> Level:
    """max·K/Σ over the micro-batches of all replicas; ``slots`` is K."""
    return Level(float(work.max(initial=0.0)) * slots, float(work.sum()))


def data_level(work: np.ndarray) -> Level:
    """max/mean of the replicas' totals."""
    totals = work.sum(axis=1)
    return Level(float(totals.max()) * len(totals), float(totals.sum()))


def context_level(seconds: np.ndarray) -> Level:
    """Σ max / Σ mean of attention compute over context ranks, from a timings array."""
    attention = seconds[..., ATTENTION]
    return Level(float(attention.max(axis=2).sum()), float(attention.mean(axis=2).sum()))


def planned_work(plan: StepPlan, work: Work) -> np.ndarray:
    """The work of a plan in FLOPs, forward + backward.

    Replicas that share a micro-batch have an equal part of it each.
    """
    longest = max((len(replica.forward) for replica in plan.replicas), default=0)
    result = np.zeros((len(plan.replicas), longest))
    for number, replica in enumerate(plan.replicas):
        for index, micro_batch in enumerate(replica.forward):
            result[number, index] = sum(
                work.total(part.tokens, part.context) for part in replica.slices_of(micro_batch)
            ) / len(micro_batch.replicas)
    return result


def step_flops(plan: StepPlan, work: Work) -> int:
    """Model FLOPs of the step, forward + backward, attention of each piece (Σ d²) included.

    Recomputation is left out, so a utilisation computed from it is model FLOP utilisation.
    """
    return sum(work.total(piece.tokens) for piece in plan.pieces)
