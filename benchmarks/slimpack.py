"""SlimPack on Generator A: simulated step time, balance, cuts and planning time, without delay.

A step holds N windows of C tokens of the stream, in the pieces that ``original`` cuts; of methods
that delay, what they release at a cap of 1.5·C. The cost is one layer of LLaMA2-7B
(benchmarks/workloads.py), the pipeline has four ranks, messages take no time; T/S is the simulated
step time over the step's work on one of them, 1 without any bubble. "Overhead" adds the forward
time of 1 % of C tokens of matrix products to every action on every stage. "Interleaved" has two
stages per rank. "Open" are the tokens of micro-batches between forward and backward on the
fullest rank.

``wlb``, ``balanced``, ``tapered`` and ``auto`` are the planner's packings. ``unsliced`` is the best
of many whole-piece plans, step by step: longest first into M micro-batches, every M from N to 4·N
at a cap of C and of 1.5·C. ``slim M·N`` has M MicroPacks for each of the N micro-batches. The
asymmetric rows balance forward and backward apart, in three executions: packs that run whole in
both passes (no executor does; a bound), units with a graph each, and forward recomputed inside
backward.

Run ``python -m benchmarks.slimpack --help``. Prints tables and then, as its last line, one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, window_pieces
from lightning_wlb.cost.flops import linear_flops
from lightning_wlb.plan import Piece, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning import DataSettings, MeshSettings, Planner
from lightning_wlb.planning.asymmetric import slice_pieces_asymmetric
from lightning_wlb.planning.judge import PipelineJudge
from lightning_wlb.planning.merging import merge_pieces
from lightning_wlb.planning.packing.best_fit import pack as best_fit
from lightning_wlb.planning.packing.wlb import pack as longest_first
from lightning_wlb.planning.replicas import asymmetric_replica_plan, replica_plan, whole
from lightning_wlb.planning.slicing import PrefixWork, deal_pieces, share_packs, slice_pieces
from lightning_wlb.planning.units import units
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.schedule.packflow import backward_order, packflow
from lightning_wlb.schedule.simulate import simulate

RANKS = 4
SLIM = ((2, 1, 0), (2, 1.25, 0), (4, 1, 0), (2, 1.25, RANKS - 1), (4, 1, RANKS - 1))
PLANNED = {"wlb": 1.5, "balanced": 1.5, "tapered": 1, "auto": 1}  # packing: cap over C
UNSLICED = ("original", "best_fit", "unsliced", "wlb", "balanced", "tapered")
TOTAL = PrefixWork.of(REFERENCE_WORK.total)
PASSES = (PrefixWork.of(REFERENCE_WORK.forward), PrefixWork.of(REFERENCE_WORK.backward))
TARGETS = {
    "4/slim 2·N, cap 1.25·C": {"step": 1.385, "step_overhead": 1.40, "imbalance": 1.005, "cuts": 7},
    "4/slim 4·N": {"step": 1.20, "step_overhead": 1.22, "imbalance": 1.005, "cuts": 7},
    "4/asymmetric 4·N": {"imbalance_forward": 1.01, "imbalance_backward": 1.01, "cuts": 13},
}


def work_of(slices: Sequence[Slice]) -> tuple[int, int]:
    """Forward and backward work of a micro-batch."""
    return (
        sum(REFERENCE_WORK.forward(part.tokens, part.context) for part in slices),
        sum(REFERENCE_WORK.backward(part.tokens, part.context) for part in slices),
    )


@dataclass
class Step:
    """One replica's step as its actions: work of each micro-batch, and the order of backwards.

    ``work`` is what the step's length is divided by: without recomputation, which is no progress.
    """

    forward: list[int]
    backward: list[int]
    order: list[int]
    needs: list[int]
    tokens: list[int]
    work: int

    @classmethod
    def of(cls, replica: ReplicaPlan) -> Step:
        groups = [replica.slices_of(group) for group in replica.forward]
        work = [work_of(group) for group in groups]
        order, needs = backward_order(replica)
        tokens = list(map(replica.tokens_of, replica.forward))
        forward, backward = [f for f, _ in work], [b for _, b in work]
        return cls(forward, backward, order, needs, tokens, sum(forward) + sum(backward))

    @property
    def imbalance(self) -> tuple[float, float, float]:
        """max·M/Σ of forward and backward together, forward, backward."""
        both = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        return tuple(  # type: ignore[return-value]
            max(loads) * len(loads) / sum(loads) for loads in (both, self.forward, self.backward)
        )

    def simulate(self, per_rank: int = 1, overhead: int = 0) -> tuple[float, int]:
        """The step's length over its work, and the most tokens open on a rank."""
        programs = [
            packflow(rank, RANKS, self.order, self.needs, per_rank) for rank in range(RANKS)
        ]

        def duration(action: Action) -> int:
            loads = self.forward if action.kind == FORWARD else self.backward
            return loads[action.micro_batch] // per_rank + overhead

        result = simulate(
            programs, duration, opened_bytes=lambda action: self.tokens[action.micro_batch]
        )
        return result.total_ns / self.work, max(result.peak_bytes) // per_rank


@dataclass
class Method:
    """What one method's steps look like."""

    name: str
    window: int
    steps: list[list[float]] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    delay: float = 0.0

    def add(self, step: Step, pieces: int, slices: int, seconds: float | None = None) -> None:
        overhead = linear_flops(REFERENCE_WORK.shape, self.window // 100)
        plain, open_tokens = step.simulate()
        self.steps.append(
            [
                plain,
                step.simulate(overhead=overhead)[0],
                step.simulate(2)[0],
                *step.imbalance,
                slices - pieces,
                len(step.forward),
                open_tokens / self.window,
            ]
        )
        if seconds is not None:
            self.milliseconds.append(1e3 * seconds)

    def row(self) -> dict[str, Any]:
        """Means over steps, and a few extremes."""
        values = np.array(self.steps)
        names = ("step", "step_overhead", "step_interleaved", "imbalance", "imbalance_forward")
        names += ("imbalance_backward", "cuts", "micro_batches", "open_tokens")
        row: dict[str, Any] = {"method": self.name}
        row |= {name: float(values[:, i].mean()) for i, name in enumerate(names)}
        row["step_p99"] = float(np.percentile(values[:, 0], 99))
        row["open_tokens_max"] = float(values[:, 8].max())
        row["delay"] = self.delay
        row["ms_per_plan"] = float(np.median(self.milliseconds)) if self.milliseconds else None
        return row


def steps_of(lengths: np.ndarray, tokens: int, steps: int) -> list[list[Piece]]:
    """Global batches of exactly ``tokens`` tokens."""
    result: list[list[Piece]] = []
    at = 0
    for number in range(steps):
        batch: list[Piece] = []
        filled = 0
        while filled < tokens:
            batch.append(Piece(at, 0, int(lengths[at]), number))
            filled += batch[-1].tokens
            at += 1
        result.append(batch)
    return result


def shard(slices: Sequence[Slice], replicas: int) -> tuple[str, int]:
    return "per_sequence", sum(part.tokens for part in slices)


def whole_pieces(groups: Sequence[Sequence[Piece]]) -> ReplicaPlan:
    return replica_plan([[whole(piece) for piece in g] for g in groups if g], 0, shard)


def unsliced(pieces: list[Piece], count: int, window: int) -> list[Step]:
    """Whole-piece plans of the same pieces: every M from N to 4·N, caps of C and 1.5·C."""
    steps = []
    for bins in range(count, 4 * count + 1, max(count // 4, 1)):
        for cap in (window, window * 3 // 2):
            groups, carried = longest_first(pieces, bins, cap, TOTAL)
            if not carried:
                steps.append(Step.of(whole_pieces(groups)))
    return steps


def original(pieces: list[Piece], window: int) -> ReplicaPlan:
    groups: list[list[Piece]] = [[]]
    for piece in pieces:
        if sum(other.tokens for other in groups[-1]) == window:
            groups.append([])
        groups[-1].append(piece)
    return whole_pieces(groups)


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """The answer, and CPU seconds."""
    begin = time.process_time()
    made = make()
    return made, time.process_time() - begin


def recomputed(step: Step, again: list[int]) -> Step:
    """The step where each backward first runs the forward of its slices again."""
    backward = [load + more for load, more in zip(step.backward, again, strict=True)]
    return replace(step, backward=backward)


def whole_packs(forward: list[list[Slice]], backward: list[list[Slice]]) -> tuple[Step, list[int]]:
    """Asymmetric packs as single actions, and the forward work of each backward pack."""
    last = {(part.document, part.origin): at for at, pack in enumerate(forward) for part in pack}
    count = len(forward)
    loads = [work_of(pack) for pack in backward] + [(0, 0)] * (count - len(backward))
    needs = [
        max([at, *(last[part.document, part.origin] for part in pack)]) + 1
        for at, pack in enumerate(backward)
    ]
    needs += range(len(needs) + 1, count + 1)
    forward_loads = [work_of(pack)[0] for pack in forward]
    backward_loads = [load for _, load in loads]
    step = Step(
        forward_loads,
        backward_loads,
        list(range(count)),
        needs,
        [sum(part.tokens for part in pack) for pack in forward],
        sum(forward_loads) + sum(backward_loads),
    )
    return step, [again for again, _ in loads]


def measure(count: int, window: int, steps: int, seeds: Sequence[int]) -> dict[str, Method]:
    """Every method on the same batches."""
    methods: dict[str, Method] = {}

    def method(name: str) -> Method:
        return methods.setdefault(name, Method(name, window))

    best: list[list[float]] = []
    for seed in seeds:
        stream = window_pieces(
            generator_a(documents_for(steps, count, window), window, seed), window
        )
        for pieces in steps_of(stream, count * window, steps):
            pieces_count = len(pieces)
            for name, plan in (
                ("original", original(pieces, window)),
                ("best_fit", whole_pieces(best_fit(pieces, window))),
            ):
                method(name).add(Step.of(plan), pieces_count, pieces_count)
            candidates = unsliced(pieces, count, window)
            best.append([min(step.simulate(v)[0] for step in candidates) for v in (1, 2)])
            chosen = min(candidates, key=lambda step: step.simulate()[0])
            method("unsliced").add(chosen, pieces_count, pieces_count)
            for multiple, cap, taper in SLIM:
                cap = int(cap * window)
                packs, seconds = timed(
                    partial(slice_pieces, pieces, multiple * count, cap, TOTAL, taper=taper)
                )
                suffix = "" if cap == window else f", cap {cap / window:g}·C"
                suffix += ", tapered" if taper else ""
                method(f"slim {multiple}·N{suffix}").add(
                    Step.of(replica_plan(packs, 0, shard)),
                    pieces_count,
                    sum(map(len, packs)),
                    seconds,
                )
            for multiple, cap in ((2, window * 5 // 4), (4, window)):
                (forward, backward), seconds = timed(
                    partial(slice_pieces_asymmetric, pieces, multiple * count, cap, *PASSES)
                )
                slices = sum(map(len, forward))
                step, again = whole_packs(forward, backward)
                name = f"asymmetric {multiple}·N"
                method(name).add(step, pieces_count, slices, seconds)
                method(f"{name}, recomputed").add(recomputed(step, again), pieces_count, slices)
                in_units = units(asymmetric_replica_plan(forward, backward, 0, shard), 1, 1)
                method(f"{name}, units").add(Step.of(in_units), pieces_count, slices)
        for name, cap in PLANNED.items():
            planned(method(name), name, cap, stream, count, steps)
    # Each schedule has its own best plan.
    unsliced_steps = methods["unsliced"].steps
    for row, (_, interleaved) in zip(unsliced_steps, best, strict=True):
        row[2] = interleaved
    return methods


def planned(
    method: Method, name: str, cap: float, stream: np.ndarray, count: int, steps: int
) -> None:
    """A packing of the planner's; those that delay have steps of other tokens.

    It is told the schedule: what its interleaved steps take comes from a planner of its own.
    """
    window = method.window
    data = DataSettings(window, count, packing=name, cap=int(cap * window), shuffle=False)
    plans = []
    for per_rank in (1, 2):
        planner = Planner(
            stream,
            data,
            REFERENCE_WORK.total,
            MeshSettings(pipeline_parallel_size=RANKS, stages_per_rank=per_rank),
            forward=REFERENCE_WORK.forward,
        )
        begin = time.process_time()
        plans.append(list(takewhile(_in_epoch, (planner.next_step() for _ in range(steps)))))
        if per_rank == 1:
            method.milliseconds.append(1e3 * (time.process_time() - begin) / len(plans[0]))
    for plan, interleaved in zip(*plans, strict=True):
        replica = plan.replicas[0]
        method.add(Step.of(replica), len(plan.pieces), len(replica.slices))
        method.steps[-1][2] = Step.of(interleaved.replicas[0]).simulate(2)[0]
    method.delay = float(np.mean([plan.delay for plan in plans[0]]))


def _in_epoch(plan: StepPlan | None) -> bool:
    return plan is not None and not plan.drain


def merges(window: int, steps: int, seed: int, count: int = 4, over: int = 8) -> dict[str, Any]:
    """DP-Merge, documents up to ``window`` tokens on ``over`` replicas: balance and step time.

    Balance is the busiest replica's work over Σ work / DP of a step; step time is T·DP/S of the
    plans that ``auto`` chooses and, at the same number of MicroPacks, of those without merges.
    """
    stream = window_pieces(generator_a(documents_for(steps, count, window), window, seed), window)
    batches = steps_of(stream, count * window, steps)
    result: dict[str, Any] = {"window": window, "N": count, "replicas": over, "steps": steps}
    for percent in (0, 10):
        degrees = np.array(
            [
                [
                    max(merge_pieces(pieces, over, TOTAL, per_capacity, percent).loads)
                    * over
                    / sum(TOTAL(piece.tokens) for piece in pieces)
                    for per_capacity in (0, 1, 2, 4, 8)
                ]
                for pieces in batches
            ]
        )
        result[f"balance, {percent} % overhead"] = {
            "not merged": float(degrees[:, 0].mean()),
            **{f"alpha 1/{k}": float(degrees[:, i + 1].mean()) for i, k in enumerate((1, 2, 4, 8))},
            "best alpha of each step": float(degrees.min(axis=1).mean()),
        }
    mesh = MeshSettings(replicas=over, pipeline_parallel_size=RANKS)
    data = DataSettings(window, count, packing="auto", shuffle=False)
    planner = Planner(stream, data, REFERENCE_WORK.total, mesh, forward=REFERENCE_WORK.forward)
    judge = PipelineJudge(REFERENCE_WORK.total, REFERENCE_WORK.forward, RANKS)
    times: dict[str, list[float]] = {"auto": [], "not merged": []}
    for pieces in batches[: max(steps // 4, 1)]:
        plan = planner.next_step()
        assert plan is not None
        alone = merge_pieces(pieces, over, TOTAL, 0)
        packs = share_packs(alone.loads, max(sum(len(r.forward) for r in plan.replicas), 4 * count))
        whole_plan = [
            replica_plan(slice_pieces(own, m, window, TOTAL), number, shard)
            for number, (own, m) in enumerate(zip(alone.own, packs, strict=True))
        ]
        ideal = sum(alone.loads) / over
        for name, made in (("auto", plan.replicas), ("not merged", whole_plan)):
            times[name].append(judge(made).time / ideal)
    result["T·DP/S"] = {name: float(np.mean(values)) for name, values in times.items()}
    return result


def replicas(window: int, steps: int, seed: int, counts: Sequence[int]) -> dict[str, float]:
    """T·DP/S of slim 4·N with 4 micro-batches for each replica, by number of replicas."""
    result = {}
    for replicas_count in counts:
        count = 4 * replicas_count
        few = max(steps // replicas_count, 8)
        stream = window_pieces(generator_a(documents_for(few, count, window), window, seed), window)
        ratios = []
        for pieces in steps_of(stream, count * window, few):
            dealt = deal_pieces(pieces, replicas_count, TOTAL)
            loads = [sum(TOTAL(piece.tokens) for piece in own) for own in dealt]
            packs = share_packs(loads, 4 * count)
            made = [
                Step.of(replica_plan(slice_pieces(own, m, window, TOTAL), 0, shard))
                for own, m in zip(dealt, packs, strict=True)
            ]
            longest = max(step.simulate()[0] * step.work for step in made)
            ratios.append(longest * replicas_count / sum(step.work for step in made))
        result[str(replicas_count)] = float(np.mean(ratios))
    return result


def show(count: int, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Generator A, N = {count}, PP {RANKS}, simulated")
    columns = {
        "method": "method",
        "step": "T/S",
        "step_p99": "p99",
        "step_overhead": "with overhead",
        "step_interleaved": "interleaved",
        "imbalance": "imbalance",
        "imbalance_forward": "forward",
        "imbalance_backward": "backward",
        "cuts": "cuts",
        "micro_batches": "M",
        "open_tokens": "open (C)",
        "open_tokens_max": "max",
        "delay": "delay",
        "ms_per_plan": "ms",
    }
    for title in columns.values():
        table.add_column(title, justify="left" if title == "method" else "right")
    for row in rows:
        values = (row[name] for name in columns)
        table.add_row(
            *("" if v is None else v if isinstance(v, str) else f"{v:.4g}" for v in values)
        )
    console.print(table)


def misses(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Targets that a row does not reach."""
    return [
        f"{key}: {name} {rows[key][name]:.4f} > {bound}"
        for key, targets in TARGETS.items()
        if key in rows
        for name, bound in targets.items()
        if rows[key][name] > bound
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slimpack", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=300, help="steps per seed (default 300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--window", type=int, default=131_072, help="C in tokens (default 131072)")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[4, 16], help="N (default 4 16)"
    )
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 8, 32], help="DP (default 1 8 32)"
    )
    arguments = parser.parse_args(argv)
    console = Console(width=170)
    rows: dict[str, dict[str, Any]] = {}
    ratios: dict[str, dict[str, Any]] = {}
    for count in arguments.micro_batches:
        steps = max(arguments.steps * 4 // count, 1)
        made = measure(count, arguments.window, steps, arguments.seeds)
        of_count = [method.row() for method in made.values()]
        show(count, of_count, console)
        rows |= {f"{count}/{row['method']}": row for row in of_count}
        sliced = rows[f"{count}/slim 4·N"]
        for name in ("step", "step_interleaved"):
            best = min(
                (row for row in of_count if row["method"] in UNSLICED), key=lambda row: row[name]
            )
            over = sliced[name] / best[name]
            ratios[f"{count}/{name}"] = {"best": best["method"], "ratio": over}
            console.print(f"slim 4·N over {best['method']}, {name}: {over:.4f}")
    by_replicas = replicas(
        arguments.window, arguments.steps, arguments.seeds[0], arguments.replicas
    )
    console.print("T·DP/S of slim 4·N by replicas:", by_replicas)
    merged = merges(8 * arguments.window, max(arguments.steps // 4, 1), arguments.seeds[0])
    console.print("DP-Merge:", merged)
    missed = misses(rows)
    console.print("targets missed:", missed or "none")
    print(
        json.dumps(
            {
                "benchmark": "slimpack",
                **vars(arguments),
                "rows": rows,
                "slim 4·N over the best unsliced": ratios,
                "by_replicas": by_replicas,
                "merges": merged,
                "missed": missed,
            }
        )
    )


if __name__ == "__main__":
    main()
