"""From the timings and the plan of one step to its imbalance degrees, as plain numbers.

Every rank times its own actions; gathered from all ranks, the times are one array of seconds for
each pipeline. Three ratios come out of it (docs/design.md, "Imbalance degree"). Each is 1 where the
work is even, and the part of it above 1 is what a perfect balance could save at that level:

* *pipeline*: max·K/Σ of the forward + backward compute of the K micro-batches of all replicas,
  micro-batches left empty included (WLB-LLM §3.1). On each stage and in each pass a micro-batch
  takes as long as the slowest of its context and tensor ranks, which work in step;
* *data*: max/mean of the replicas' totals;
* *context*: Σ max / Σ mean over the context ranks of attention compute, of every micro-batch,
  stage, tensor rank and pass. Attention is timed between collectives: a whole forward includes
  the wait for the slowest rank and takes equally long everywhere.

The first two are also computed from a plan's FLOPs, and all three from a predicted step. A ratio of
sums keeps its two sums (:class:`Level`), so that steps are aggregated by adding them up.

Pipelines of a step may differ in their number of ranks. Work is therefore that of all ranks of a
pipeline, and even where each pipeline has as much of it as it has ranks: its *share* is its number
of ranks over that of the mean pipeline, by which its work is divided before it is compared, and its
micro-batches are counted. On a mesh every share is 1.

The *timings* of a pipeline are float64 seconds [pipeline, context, tensor, micro_batches,
2 (forward, backward), 2 (compute, attention)], zero where it has no such micro-batch. *Work*
is float64 [pipelines, micro_batches] in any unit times ranks, likewise zero there.

Cost: linear in ranks × micro-batches, and in the plan's slices for its FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.step import StepPrediction
from lightning_wlb.schedule.actions import FORWARD, Timing

COMPUTE, ATTENTION = 0, 1
"""Last axis of a pipeline's timings: what was timed."""

Timings = Sequence[np.ndarray] | np.ndarray
"""The timings of every pipeline of a step; of a mesh they may be one array."""


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


def measured_imbalance(timings: Timings, slots: float) -> Imbalance:
    """The three levels of a step, from its timings and K (see :func:`slots`)."""
    work, by_ranks = rank_seconds(timings), shares([each.shape[:3] for each in timings])
    return Imbalance(
        pipeline_level(work, slots, by_ranks), data_level(work, by_ranks), context_level(timings)
    )


def planned_imbalance(plan: StepPlan, work: Work) -> tuple[Level, Level]:
    """The pipeline and the data level by the FLOPs of the plan."""
    flops, by_ranks = planned_work(plan, work), shares_of(plan)
    return pipeline_level(flops, slots(plan), by_ranks), data_level(flops, by_ranks)


def predicted_imbalance(step: StepPrediction) -> Imbalance:
    """The three levels of a predicted step, by its nanoseconds."""
    work = step.work_ns * np.array(step.abreast, dtype=np.float64)[:, None]
    by_ranks = shares_of(step.plan)
    return Imbalance(
        pipeline_level(work, slots(step.plan), by_ranks),
        data_level(work, by_ranks),
        Level(*step.context_ns),
    )


def rank_timings(timings: Iterable[Timing], micro_batches: int) -> np.ndarray:
    """One rank's part of its pipeline's timings, of a size that every rank knows from the plan.

    Args:
        timings: of one step; micro-batches are numbered in the order of the replica's forward.
        micro_batches: of the replica that has the most in this step.
    """
    seconds = np.zeros((micro_batches, 2, 2))
    for timing in timings:
        passed = 0 if timing.action.kind == FORWARD else 1
        seconds[timing.action.micro_batch, passed] += timing.compute, timing.attention
    return seconds


def shapes_of(plan: StepPlan, mesh: Mesh) -> list[tuple[int, ...]]:
    """Ranks of each pipeline of a step on its axes: pipeline, context, tensor."""
    if not plan.strategy:
        return [mesh.shape[1:]] * mesh.data
    return [(len(each.stages), each.context, each.tensor) for each in plan.strategy]


def in_pipelines(seconds: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The timings of pipelines on consecutive ranks, from every rank's part: [ranks, ...]."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    each = zip(np.split(seconds, ends[:-1]), shapes, strict=True)
    return [part.reshape(*shape, *part.shape[1:]) for part, shape in each]


def shares(shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Ranks of each pipeline over those of the mean one, from its ranks on each axis."""
    ranks = np.array([math.prod(shape) for shape in shapes], dtype=np.float64)
    return ranks / ranks.mean()


def shares_of(plan: StepPlan) -> np.ndarray:
    """The shares of a step's pipelines."""
    return shares([(scheme.size,) for scheme in plan.strategy] or [(1,)] * len(plan.replicas))


def slots(plan: StepPlan, counts: Sequence[int] | None = None) -> float:
    """K: micro-batches of all replicas, those that the step leaves empty included.

    Those of a pipeline count by its share. What is left empty is of no pipeline, and counts 1.

    Args:
        plan: of the step.
        counts: micro-batches of each replica as they ran; None: as planned.
    """
    if counts is None:
        counts = [len(replica.forward) for replica in plan.replicas]
    return float(np.dot(counts, shares_of(plan))) + max(plan.micro_batches - sum(counts), 0)


def micro_batch_seconds(timings: Timings) -> np.ndarray:
    """What each micro-batch costs its pipeline, in seconds of one rank after another."""
    return np.array([each[..., COMPUTE].max(axis=(1, 2)).sum(axis=(0, 2)) for each in timings])


def rank_seconds(timings: Timings) -> np.ndarray:
    """The work of timings: :func:`micro_batch_seconds` of all ranks that work side by side."""
    abreast = [math.prod(each.shape[1:3]) for each in timings]
    return micro_batch_seconds(timings) * np.array(abreast)[:, None]


def pipeline_level(work: np.ndarray, slots: float, shares: np.ndarray | float = 1.0) -> Level:
    """max·K/Σ over the micro-batches of all replicas; ``slots`` is K."""
    each = work / np.reshape(shares, (-1, 1))
    return Level(float(each.max(initial=0.0)) * slots, float(work.sum()))


def data_level(work: np.ndarray, shares: np.ndarray | float = 1.0) -> Level:
    """max/mean of the replicas' totals."""
    totals = work.sum(axis=1)
    return Level(float((totals / shares).max()) * len(totals), float(totals.sum()))


def context_level(timings: Timings) -> Level:
    """Σ max / Σ mean of attention compute over context ranks, each group by its ranks."""
    attention = [each[..., ATTENTION] for each in timings]
    peak = sum(float(each.max(axis=1).sum()) * each.shape[1] for each in attention)
    return Level(peak, float(sum(each.sum() for each in attention)))


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
