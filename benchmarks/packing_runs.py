"""Runs one packing method over a workload and measures what it makes of the steps.

A step goes through the method exactly as in the planner, but for the layout of micro-batches on
context-parallel ranks and the validation of the plan, which are the same for all methods. Its time
is simulated: 1F1B (PackFlow where pieces are sliced) on the given mesh, the exact work of every
micro-batch, no communication and no overhead per action.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from lightning_wlb.planning.costs import PieceCosts
from lightning_wlb.planning.merging import shared_work
from lightning_wlb.planning.pipeline import pipeline_time

from benchmarks.workloads import REFERENCE_WORK
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.arrivals import GlobalBatches
from lightning_wlb.planning.judge import PipelineJudge
from lightning_wlb.planning.packing.auto import AutoPacker
from lightning_wlb.planning.packing.base import Mesh
from lightning_wlb.planning.packing.slim import SlimPacker
from lightning_wlb.planning.replicas import unsharded

STAGES = 4
WARM = 50  # steps of 4 windows before the first that is measured


class Step(NamedTuple):
    """One step of a run.

    Attributes:
        number: of the step, 0-based.
        pieces: that entered it.
        replicas: their plans.
        seconds: of processor time that planning took.
    """

    number: int
    pieces: list[Piece]
    replicas: list[ReplicaPlan]
    seconds: float


def run(lengths: np.ndarray, data: DataSettings, mesh: Mesh) -> Iterator[Step]:
    """The steps of one epoch before its last global batch, in the order of the store."""
    rules = data.rules(lengths, REFERENCE_WORK.total, REFERENCE_WORK.forward)
    packer = data.method(rules)
    arrivals = GlobalBatches(
        lengths, data.nominal_tokens, data.context_window, data.method.cuts_stream, 0, False
    )
    number = 0
    while True:
        arrivals.step = number
        begin = time.process_time()
        groups, drain = packer.next_step(arrivals, number)
        # The last global batch of an epoch is short.
        if drain or not any(groups) or not arrivals.peek(1):
            return
        replicas = packer.replicas(groups, mesh, unsharded)
        seconds = time.process_time() - begin
        yield Step(number, [piece for group in groups for piece in group], replicas, seconds)
        number += 1


def measure(
    lengths: np.ndarray, data: DataSettings, steps: int, mesh: Mesh | None = None, warm: int = 0
) -> dict[str, Any]:
    """Measure ``steps`` steps over documents that arrive in the given order.

    Args:
        lengths: tokens of each.
        data: the settings; the order is that of the store.
        steps: to measure, fewer if the documents do not suffice.
        mesh: None: one replica of :data:`STAGES` stages.
        warm: steps before them.

    Returns:
        Simulated step time over work per rank (mean over steps weighted by work, and p99; work of
        the pieces, without what sharing one among replicas adds), and the
        formula max over replicas of S + (P - 1)·largest micro-batch; that time over what M = N
        equal micro-batches take; imbalance degrees max·K/Σ (mean, 99th percentile, aggregate,
        forward and backward apart, K = N or the step's number of micro-batches if that is more);
        tokens per step over N·C with their coefficient of variation and least; delay in steps,
        mean over tokens and maximum; micro-batches; milliseconds per step.
    """
    mesh = mesh or Mesh(1, STAGES)
    costs = PieceCosts(REFERENCE_WORK.total, data.context_window, REFERENCE_WORK.forward)
    judge = PipelineJudge(costs.total, costs.forward, mesh.stages)
    sliced = issubclass(data.method, SlimPacker | AutoPacker)
    rows: list[tuple[float, ...]] = []
    delays: list[tuple[int, int]] = []
    oldest = 0
    for step in run(lengths, data, mesh):
        if step.number < warm:
            continue
        if len(rows) == steps:
            break
        times, formulas, totals, forwards = [], [0], [], []
        for replica in step.replicas:
            total = [_work(costs.total, replica, group) for group in replica.forward]
            forward = [_work(costs.forward, replica, group) for group in replica.forward]
            if not sliced:
                backward = [t - f for t, f in zip(total, forward, strict=True)]
                times.append(pipeline_time(forward, backward, mesh.stages))
            formulas.append(sum(total) + (mesh.stages - 1) * max(total, default=0))
            totals += total
            forwards += forward
        if sliced:
            times = [judge(step.replicas).time]
        rows.append(
            (max(times), max(formulas), len(totals), *_summary(totals), *_summary(forwards),
             *_summary([t - f for t, f in zip(totals, forwards, strict=True)]),
             sum(piece.tokens for piece in step.pieces), step.seconds,
             sum(costs.total(piece.tokens) for piece in step.pieces))
        )  # fmt: skip
        for piece in step.pieces:
            delays.append((piece.tokens, piece.tokens * (step.number - piece.arrival)))
            oldest = max(oldest, step.number - piece.arrival)
    table = np.array(rows, dtype=np.float64)
    spent, formula, count, top, work, top_f, work_f, top_b, work_b, tokens, seconds, own_work = (
        table.T
    )
    share = own_work / mesh.replicas
    bins = np.maximum(count, data.micro_batches)
    degrees = top * bins / work
    own = data.micro_batches / mesh.replicas
    tokens = tokens / data.nominal_tokens
    return {
        "steps": len(rows),
        "time_over_work": spent.sum() / share.sum(),
        "time_over_work_p99": _p99(spent / share),
        "formula_over_work": formula.sum() / share.sum(),
        "time_over_equal": spent.sum() / share.sum() * own / (own + mesh.stages - 1),
        "time_over_equal_p99": _p99(spent / share) * own / (own + mesh.stages - 1),
        "imbalance_mean": degrees.mean(),
        "imbalance_p99": _p99(degrees),
        "imbalance_aggregate": (top * bins).sum() / work.sum(),
        "imbalance_forward_mean": (top_f * bins / work_f).mean(),
        "imbalance_backward_mean": (top_b * bins / work_b).mean(),
        "tokens_per_step": tokens.mean(),
        "tokens_variation": tokens.std() / tokens.mean(),
        "tokens_least": tokens.min(),
        "delay_mean": sum(held for _, held in delays) / sum(each for each, _ in delays),
        "delay_max": oldest,
        "micro_batches": count.mean(),
        "ms_per_step": 1e3 * seconds.mean(),
    }


def averaged(
    streams: Sequence[np.ndarray], data: DataSettings, steps: int, mesh: Mesh, warm: int
) -> dict[str, float]:
    """:func:`measure` over several streams: means, but the worst of the extremes."""
    runs = [measure(stream, data, steps, mesh, warm) for stream in streams]
    result: dict[str, float] = {}
    for name in runs[0]:
        values = [float(each[name]) for each in runs]
        extreme = {"delay_max": max, "tokens_least": min, "steps": sum}.get(name)
        result[name] = round(extreme(values) if extreme else float(np.mean(values)), 4)
    return result


def _work(cost: Any, replica: ReplicaPlan, group: MicroBatch) -> int:
    """Work of a micro-batch on one of its replicas."""
    total = 0
    for index in group.slices:
        part = replica.slices[index]
        before = part.start - part.origin
        total += cost(part.stop - part.origin) - (cost(before) if before else 0)
    members = len(group.replicas)
    return total if members == 1 else shared_work(total, members)


def _summary(loads: Sequence[int]) -> tuple[int, int]:
    return max(loads), sum(loads)


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))
