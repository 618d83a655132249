"""SlimPack on Generator A: simulated step time, balance, cuts and planning time, without delay.

A step holds N windows of C tokens of the stream, in the pieces that ``original`` cuts; of ``wlb``,
which delays, what it releases at a cap of 1.5·C. The cost is one layer of LLaMA2-7B
(benchmarks/workloads.py), the pipeline has four ranks, messages take no time; T/S is the simulated
step time over the step's work on one of them, 1 without any bubble. "Overhead" adds the forward
time of 1 % of C tokens of matrix products to every action on every stage. "Interleaved" has two
stages per rank. "Open" are the tokens of micro-batches between forward and backward on the
fullest rank.

``original``, ``best_fit``, ``wlb`` and ``auto`` are the planner's packings. ``unsliced`` is the
best of many whole-piece plans, step by step: longest first into M micro-batches, ten M from N to
8·N at a cap of C and of 1.5·C. ``slim M·N`` has M MicroPacks for each of the N micro-batches,
equal or tapered. Planning times are CPU times of plain Python, of the
``slim`` rows those of slicing alone.

Run ``python -m benchmarks.slimpack --help``. Prints tables and the targets, and then, as its last
line, one JSON object. ``--save`` keeps what the file has of methods that the package no longer
has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.packing_runs import PASSES, STAGES, loads_of
from benchmarks.slimpack_tables import Target, markdown, ratios, show, targets
from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, window_pieces
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, ReplicaPlan, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.dealing import deal_capped
from lightning_wlb.planning.dp_merge import merge_pieces
from lightning_wlb.planning.plan_scoring import WorkScorer
from lightning_wlb.planning.replica_plans import replica_plan, whole
from lightning_wlb.planning.slicing import share_packs, slice_pieces
from lightning_wlb.planning.tuning import SHARING_OVERHEAD_PERCENT
from lightning_wlb.schedule.actions import FORWARD
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.schedule.simulator import simulate_replicas

TOTAL = REFERENCE_WORK.total
PIPELINE = Mesh(pipeline=STAGES)
VIRTUAL = 2  # stages of an interleaved pipeline's rank
INTERLEAVED = Mesh(pipeline=STAGES, virtual_stages=VIRTUAL)
SLIM = ((2, 1, 0), (2, 1.25, 0), (4, 1, 0), (2, 1.25, STAGES - 1), (4, 1, STAGES - 1))
MULTIPLES = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)  # of N: micro-batches of unsliced plans
ALPHAS = (1, 2, 4, 8)  # 1/alpha of DP-Merge
PLANNED: dict[str, tuple[Any, float]] = {  # row: the packing, its cap in windows
    "original": ("original", 1),
    "best_fit": ("best_fit", 1),
    "wlb": ("wlb", 1.5),
    "auto": ("auto", 1),
}


def work_of(replica: ReplicaPlan) -> int:
    return sum(loads_of(TOTAL, replica))


def over_work(replica: ReplicaPlan, overhead: int = 0) -> float:
    """The step of one replica over its work."""
    return WorkScorer(REFERENCE_WORK, PIPELINE, overhead)([replica]).time / work_of(replica)


def over_work_interleaved(replica: ReplicaPlan) -> float:
    """The same with two stages per rank, in the programs that are executed."""
    passes = [loads_of(work, replica) for work in (REFERENCE_WORK.forward, REFERENCE_WORK.backward)]
    programs = [
        program_of("interleaved", rank, STAGES, VIRTUAL, [replica], 0) for rank in range(STAGES)
    ]
    (step,) = simulate_replicas(
        [programs],
        lambda _, action: passes[action.kind != FORWARD][action.micro_batch] // VIRTUAL,
    )
    return step.total_ns / work_of(replica)


@dataclass
class Method:
    """What one method's steps look like."""

    name: str
    window: int
    steps: list[dict[str, float]] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    delay: float = 0.0

    def add(self, replica: ReplicaPlan, pieces: int, interleaved: float | None = None) -> None:
        """Take in a step.

        Args:
            replica: its plan.
            pieces: how many entered it.
            interleaved: its T/S with two stages per rank; None: that of the same plan.
        """
        verdict = WorkScorer(REFERENCE_WORK, PIPELINE)([replica])
        overhead = REFERENCE_WORK.forward.per_token * (self.window // 100)
        row = {
            "step": verdict.time / work_of(replica),
            "step_overhead": over_work(replica, overhead=overhead),
            "step_interleaved": (
                over_work_interleaved(replica) if interleaved is None else interleaved
            ),
        }
        for name, work in PASSES.items():
            loads = loads_of(work, replica)
            row[f"imbalance{name}"] = max(loads) * len(loads) / sum(loads)
        row["cuts"] = len(replica.slices) - pieces
        row["micro_batches"] = len(replica.forward)
        row["open_tokens"] = verdict.peak / self.window
        self.steps.append(row)

    def row(self) -> dict[str, Any]:
        """Means over steps, and a few extremes."""
        values = {name: np.array([step[name] for step in self.steps]) for name in self.steps[0]}
        return {
            "method": self.name,
            **{name: float(each.mean()) for name, each in values.items()},
            "step_p99": float(np.percentile(values["step"], 99)),
            "open_tokens_max": float(values["open_tokens"].max()),
            "delay": self.delay,
            "ms_per_plan": float(np.median(self.milliseconds)) if self.milliseconds else None,
        }


def measure(count: int, window: int, steps: int, seeds: Sequence[int]) -> dict[str, Method]:
    """Every method on the same batches."""
    methods: dict[str, Method] = {}

    def method(name: str) -> Method:
        return methods.setdefault(name, Method(name, window))

    for seed in seeds:
        stream = stream_of(count, window, steps, seed)
        for pieces in steps_of(stream, count * window, steps):
            candidates = unsliced(pieces, count, window)
            method("unsliced").add(
                min(candidates, key=over_work),
                len(pieces),
                # Each schedule has its own best plan.
                min(map(over_work_interleaved, candidates)),
            )
            for multiple, cap, taper in SLIM:
                begin = time.process_time()
                packs = slice_pieces(
                    pieces, multiple * count, int(cap * window), TOTAL, taper=taper
                )
                seconds = time.process_time() - begin
                name = f"slim {multiple}·N" + ("" if cap == 1 else f", cap {cap:g}·C")
                made = method(name + (", tapered" if taper else ""))
                made.add(replica_plan(packs, 0, "per_sequence"), len(pieces))
                made.milliseconds.append(1e3 * seconds)
        for name, (packing, cap) in PLANNED.items():
            data = DataSettings(
                window, count, packing=packing, cap=int(cap * window), shuffle=False
            )
            planned(method(name), data, stream, steps)
    return methods


def planned(method: Method, data: DataSettings, stream: np.ndarray, steps: int) -> None:
    """A packing of the planner's; those that delay have steps of other tokens.

    It is told the schedule: what its interleaved steps take comes from a planner of its own.
    """
    plans = []
    for mesh in (PIPELINE, INTERLEAVED):
        planner = Planner(stream, data, REFERENCE_WORK, mesh)
        begin = time.process_time()
        plans.append(list(takewhile(_in_epoch, (planner.next_step() for _ in range(steps)))))
        if mesh is PIPELINE:
            method.milliseconds.append(1e3 * (time.process_time() - begin) / len(plans[0]))
    for plan, interleaved in zip(*plans, strict=True):
        other = over_work_interleaved(interleaved.replicas[0])
        method.add(plan.replicas[0], len(plan.pieces), other)
    method.delay = float(np.mean([plan.delay for plan in plans[0]]))


def _in_epoch(plan: StepPlan | None) -> bool:
    return plan is not None and not plan.drain


def stream_of(count: int, window: int, steps: int, seed: int) -> np.ndarray:
    """Lengths of the pieces of so many steps of ``count`` windows."""
    return window_pieces(generator_a(documents_for(steps, count, window), window, seed), window)


def steps_of(lengths: np.ndarray, tokens: int, steps: int) -> list[list[Piece]]:
    """Global batches of exactly ``tokens`` tokens."""
    ends = np.cumsum(lengths)
    assert ends[-1] >= tokens * steps, "too few documents for so many steps"
    cuts = np.searchsorted(ends, tokens * np.arange(steps + 1), side="right")
    return [
        [Piece(at, 0, int(lengths[at]), number) for at in range(first, end)]
        for number, (first, end) in enumerate(pairwise(cuts))
    ]


def unsliced(pieces: list[Piece], count: int, window: int) -> list[ReplicaPlan]:
    """Whole-piece plans of the same pieces: M from N to 8·N, caps of C and 1.5·C."""
    plans = []
    for multiple in MULTIPLES:
        for cap in (window, window * 3 // 2):
            groups, carried = deal_capped(pieces, int(multiple * count), cap, TOTAL)
            if not carried:
                packs = [[whole(piece) for piece in group] for group in groups if group]
                plans.append(replica_plan(packs, 0, "per_sequence"))
    return plans


def sliced(pieces: Sequence[Piece], replicas: int, packs: int, window: int) -> list[ReplicaPlan]:
    """Pieces dealt to replicas, none shared, and each one's in its share of the MicroPacks."""
    dealt = merge_pieces(pieces, replicas, TOTAL, 0)
    counts = share_packs(dealt.loads, packs, sum(dealt.loads))
    return [
        replica_plan(slice_pieces(own, packs, window, TOTAL), number, "per_sequence")
        for number, (own, packs) in enumerate(zip(dealt.own, counts, strict=True))
    ]


def over_share(replicas: Sequence[ReplicaPlan], pieces: Sequence[Piece]) -> float:
    """T·DP/S: the step over the mean work of a replica, without what sharing pieces adds."""
    work = sum(TOTAL(piece.tokens) for piece in pieces)
    return WorkScorer(REFERENCE_WORK, PIPELINE)(replicas).time * len(replicas) / work


def merges(window: int, steps: int, seed: int, count: int = 4, over: int = 8) -> dict[str, Any]:
    """DP-Merge, documents up to ``window`` tokens on ``over`` replicas: balance and step time.

    Balance is the busiest replica's work, what sharing pieces adds included, over Σ work / DP of a
    step; step time is T·DP/S of the plans that ``auto`` chooses and, at the same number of
    MicroPacks, of those without merges.
    """
    stream = stream_of(count, window, steps, seed)
    batches = steps_of(stream, count * window, steps)
    result: dict[str, Any] = {"window": window, "N": count, "replicas": over, "steps": steps}
    degrees = np.array(
        [
            [
                max(merge_pieces(pieces, over, TOTAL, per_capacity).loads)
                * over
                / sum(TOTAL(piece.tokens) for piece in pieces)
                for per_capacity in (0, *ALPHAS)
            ]
            for pieces in batches
        ]
    )
    result["balance"] = {
        "not merged": float(degrees[:, 0].mean()),
        **{f"alpha 1/{k}": float(degrees[:, at].mean()) for at, k in enumerate(ALPHAS, 1)},
        "best alpha of each step": float(degrees.min(axis=1).mean()),
    }
    data = DataSettings(window, count, packing="auto", shuffle=False)
    planner = Planner(stream, data, REFERENCE_WORK, Mesh(over, STAGES))
    times: dict[str, list[float]] = {"auto": [], "not merged": []}
    for pieces in batches[: max(steps // 4, 1)]:
        plan = planner.next_step()
        assert plan is not None
        packs = max(sum(len(replica.forward) for replica in plan.replicas), 4 * count)
        times["auto"].append(over_share(plan.replicas, pieces))
        times["not merged"].append(over_share(sliced(pieces, over, packs, window), pieces))
    result["T·DP/S"] = {name: float(np.mean(values)) for name, values in times.items()}
    return result


def by_replicas(window: int, steps: int, seed: int, counts: Sequence[int]) -> dict[str, float]:
    """T·DP/S of slim 4·N with 4 micro-batches for each replica, by number of replicas."""
    result = {}
    for replicas in counts:
        count = 4 * replicas
        few = max(steps // replicas, 8)
        batches = steps_of(stream_of(count, window, few, seed), count * window, few)
        times = [
            over_share(sliced(pieces, replicas, 4 * count, window), pieces) for pieces in batches
        ]
        result[str(replicas)] = float(np.mean(times))
    return result


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    rows: dict[str, dict[str, Any]] = {}
    for count in arguments.micro_batches:
        steps = max(arguments.steps * 4 // count, 1)
        made = measure(count, arguments.window, steps, arguments.seeds)
        rows |= {f"{count}/{name}": method.row() for name, method in made.items()}
    seed = arguments.seeds[0]
    dealt = by_replicas(arguments.window, arguments.steps, seed, arguments.replicas)
    merged = merges(8 * arguments.window, max(arguments.steps // 4, 1), seed)
    few, *_, many = arguments.replicas
    reached = targets(rows)
    reached.append(Target(f"DP {many} over DP {few}", 1.005, dealt[str(many)] / dealt[str(few)]))
    best = merged["balance"]["best alpha of each step"]
    reached.append(
        Target(f"DP-Merge, balance with {SHARING_OVERHEAD_PERCENT} % overhead", 1.13, best)
    )
    return {
        "benchmark": "slimpack",
        **{name: value for name, value in vars(arguments).items() if name != "save"},
        "rows": rows,
        "slices over the best unsliced": ratios(rows),
        "by_replicas": dealt,
        "merges": merged,
        "targets": [{**each._asdict(), "met": each.met} for each in reached],
    }


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("slimpack", __doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps per seed (default 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--window", type=int, default=131_072, help="C in tokens (default 131072)")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[4, 16], help="N (default 4 16)"
    )
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 8, 32], help="DP (default 1 8 32)"
    )
    parser.add_argument("--save", type=Path, help="also write PATH.json and PATH.md")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    show(result, Console(width=170))
    report.finish(result, arguments.save, markdown)


if __name__ == "__main__":
    main()
