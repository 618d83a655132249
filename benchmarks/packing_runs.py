"""Runs one packing method over a workload and measures what it makes of the steps.

A step goes through the method exactly as in the planner, but for the layout of micro-batches on
context-parallel ranks and the validation of the plan, which are the same for all methods. Its time
is simulated: 1F1B (PackFlow where pieces are sliced) on the given mesh, the exact work of every
micro-batch, no communication and no overhead per action.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.workloads import REFERENCE_WORK
from lightning_wlb.cost.flops import PassWork
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.dp_merge import shared_work
from lightning_wlb.planning.global_batches import GlobalBatches, Stream
from lightning_wlb.planning.plan_scoring import Placement, WorkScorer

STAGES = 4
WARM = 50  # steps of 4 windows before the first that is measured
PASSES = {
    "": REFERENCE_WORK.total,
    "_forward": REFERENCE_WORK.forward,
    "_backward": REFERENCE_WORK.backward,
}


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
    packer = data.packer(data.rules(lengths, REFERENCE_WORK))
    stream = Stream(data.nominal_tokens, data.context_window, packer.cuts_stream, 0, False)
    arrivals = GlobalBatches(lengths, stream)
    place = Placement(mesh, "per_sequence", packer.rules.work_scorer(mesh))
    number = 0
    while True:
        begin = time.process_time()
        groups, drain = packer.next_step(arrivals, number)
        # The last global batch of an epoch is short.
        if drain or not any(groups) or arrivals.exhausted:
            return
        replicas = packer.replicas(groups, place)
        seconds = time.process_time() - begin
        yield Step(number, [piece for group in groups for piece in group], replicas, seconds)
        number += 1


def loads_of(work: PassWork, replica: ReplicaPlan) -> list[int]:
    """Work of each micro-batch of a replica, of shared ones that replica's part."""
    loads = []
    for group in replica.forward:
        load = sum(work(part.tokens, part.context) for part in replica.slices_of(group))
        members = len(group.replicas)
        loads.append(load if members == 1 else shared_work(load, members))
    return loads


def measure(
    lengths: np.ndarray, data: DataSettings, steps: int, mesh: Mesh | None = None, warm: int = 0
) -> dict[str, float]:
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
    mesh = mesh or Mesh(pipeline=STAGES)
    scorer = WorkScorer(REFERENCE_WORK, mesh)
    rows: list[dict[str, float]] = []
    delays: list[tuple[int, int]] = []
    for step in run(lengths, data, mesh):
        if step.number < warm:
            continue
        if len(rows) == steps:
            break
        loads = {
            name: [loads_of(work, replica) for replica in step.replicas]
            for name, work in PASSES.items()
        }
        row: dict[str, float] = {
            "spent": scorer(step.replicas).time,
            "work": sum(REFERENCE_WORK.total(piece.tokens) for piece in step.pieces) / mesh.data,
            "formula": max(
                sum(own) + (mesh.pipeline - 1) * max(own, default=0) for own in loads[""]
            ),
            "count": sum(map(len, loads[""])),
            "tokens": sum(piece.tokens for piece in step.pieces) / data.nominal_tokens,
            "ms": 1e3 * step.seconds,
        }
        for name, of_replicas in loads.items():
            row[f"top{name}"] = max(max(own, default=0) for own in of_replicas)
            row[f"sum{name}"] = sum(map(sum, of_replicas))
        rows.append(row)
        delays += [(piece.tokens, step.number - piece.arrival) for piece in step.pieces]
    of = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    bins = np.maximum(of["count"], data.micro_batches)
    degrees = {name: of[f"top{name}"] * bins / of[f"sum{name}"] for name in PASSES}
    over_work = of["spent"] / of["work"]
    mean_over_work = of["spent"].sum() / of["work"].sum()
    own = data.micro_batches / mesh.data
    equal = own / (own + mesh.pipeline - 1)
    return {
        "steps": len(rows),
        "time_over_work": mean_over_work,
        "time_over_work_p99": _p99(over_work),
        "formula_over_work": of["formula"].sum() / of["work"].sum(),
        "time_over_equal": mean_over_work * equal,
        "time_over_equal_p99": _p99(over_work) * equal,
        "imbalance_mean": degrees[""].mean(),
        "imbalance_p99": _p99(degrees[""]),
        "imbalance_aggregate": (of["top"] * bins).sum() / of["sum"].sum(),
        "imbalance_forward_mean": degrees["_forward"].mean(),
        "imbalance_backward_mean": degrees["_backward"].mean(),
        "tokens_per_step": of["tokens"].mean(),
        "tokens_variation": of["tokens"].std() / of["tokens"].mean(),
        "tokens_least": of["tokens"].min(),
        "delay_mean": sum(each * held for each, held in delays) / sum(each for each, _ in delays),
        "delay_max": max(held for _, held in delays),
        "micro_batches": of["count"].mean(),
        "ms_per_step": of["ms"].mean(),
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


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))
