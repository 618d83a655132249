"""A step's imbalance degrees, from the times that ranks measured, its plan, or its prediction.

docs/design.md ("Imbalance degree") defines the degree at the levels *pipeline* (WLB-LLM §3.1),
*data* and *context*. Its excess over 1 is what a perfect balance could save at a level. On each
stage and in each pass a micro-batch takes as long as the slowest of its context and tensor ranks,
which work in step. A plan's FLOPs give the first two, a measured or a predicted step all three.
Steps are aggregated by adding up the numerators and the denominators (:class:`Level`).

*Timings* are one array for each pipeline: float64 seconds [stage, context, tensor, micro_batches,
2 (forward, backward), 2 (compute, attention)]; on the mesh, whose pipelines are alike, they may be
one array with the pipelines in front. *Work* is float64 [pipelines, micro_batches] in any unit,
summed over a pipeline's ranks. Both are zero where a pipeline has no such micro-batch.

The pipelines of a heterogeneous step differ in their number of ranks. A pipeline's *share* is its
number of ranks over that of the mean pipeline (1 on the mesh). Work is even if it is proportional
to the shares, so it is divided by them before it is compared.

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
"""Indices of the last axis of timings."""

Timings = Sequence[np.ndarray] | np.ndarray
"""The timings of every pipeline of a step."""


class Level(NamedTuple):
    """An imbalance degree as a quotient of two amounts in the unit of the work."""

    peak: float  # what the step takes, as everything waits for the heaviest
    even: float  # what it would take if the same work were spread evenly

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
"""The imbalance of a step that was not predicted: every degree is not a number."""


def measured_imbalance(timings: Timings, slots: float) -> Imbalance:
    """The three levels of a step, from its timings and K, as :func:`slots` counts it."""
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
    """One rank's times of a step: seconds [micro_batches, 2 (passes), 2 (compute, attention)].

    Args:
        timings: their micro-batches are numbered in the order of the replica's forward.
        micro_batches: the most micro-batches of a replica in this step, by the plan.
    """
    seconds = np.zeros((micro_batches, 2, 2))
    for timing in timings:
        passed = 0 if timing.action.kind == FORWARD else 1
        seconds[timing.action.micro_batch, passed] += timing.compute, timing.attention
    return seconds


def shapes_of(plan: StepPlan, mesh: Mesh) -> list[tuple[int, ...]]:
    """The number of stages, context ranks and tensor ranks of each pipeline of a step."""
    if not plan.schemes:
        return [mesh.shape[1:]] * mesh.data
    return [(len(each.stages), each.context, each.tensor) for each in plan.schemes]


def in_pipelines(seconds: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Arrange every rank's seconds [ranks, ...] as timings of pipelines on consecutive ranks."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    each = zip(np.split(seconds, ends[:-1]), shapes, strict=True)
    return [part.reshape(*shape, *part.shape[1:]) for part, shape in each]


def shares(shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Each pipeline's share, from its number of ranks on each axis."""
    ranks = np.array([math.prod(shape) for shape in shapes], dtype=np.float64)
    return ranks / ranks.mean()


def shares_of(plan: StepPlan) -> np.ndarray:
    """The shares of a step's pipelines."""
    return shares([(scheme.size,) for scheme in plan.schemes] or [(1,)] * len(plan.replicas))


def slots(plan: StepPlan) -> float:
    """K, which the pipeline level counts: the micro-batches of all replicas, empty ones included.

    A micro-batch counts by its pipeline's share; one that the step leaves empty counts 1.
    """
    counts = [len(replica.forward) for replica in plan.replicas]
    return float(np.dot(counts, shares_of(plan))) + max(plan.micro_batches - sum(counts), 0)


def rank_seconds(timings: Timings) -> np.ndarray:
    """Work of each micro-batch in rank-seconds, [pipelines, micro_batches].

    Seconds of the slowest ranks, over stages and passes, times the ranks that work side by side.
    """
    slowest = [each[..., COMPUTE].max(axis=(1, 2)).sum(axis=(0, 2)) for each in timings]
    return np.array(slowest) * np.array([[math.prod(each.shape[1:3])] for each in timings])


def pipeline_level(work: np.ndarray, slots: float, shares: np.ndarray | float = 1.0) -> Level:
    """The pipeline level of work; ``slots`` is K."""
    each = work / np.reshape(shares, (-1, 1))
    return Level(float(each.max(initial=0.0)) * slots, float(work.sum()))


def data_level(work: np.ndarray, shares: np.ndarray | float = 1.0) -> Level:
    """The data level of work."""
    totals = work.sum(axis=1)
    return Level(float((totals / shares).max()) * len(totals), float(totals.sum()))


def context_level(timings: Timings) -> Level:
    """The context level; each group of context ranks counts by its number of ranks."""
    attention = [each[..., ATTENTION] for each in timings]
    peak = sum(float(each.max(axis=1).sum()) * each.shape[1] for each in attention)
    return Level(peak, float(sum(each.sum() for each in attention)))


def planned_work(plan: StepPlan, work: Work) -> np.ndarray:
    """The work of a plan in FLOPs; replicas that share a micro-batch have an equal part each."""
    longest = max((len(replica.forward) for replica in plan.replicas), default=0)
    result = np.zeros((len(plan.replicas), longest))
    for number, replica in enumerate(plan.replicas):
        for index, micro_batch in enumerate(replica.forward):
            result[number, index] = sum(
                work.total(part.tokens, part.context) for part in replica.slices_of(micro_batch)
            ) / len(micro_batch.replicas)
    return result
