"""SlimPack on Generator A: simulated step time, balance, cuts and planning time, without delay.

A step holds N windows of C tokens of the stream, in the pieces that ``original`` cuts; of methods
that delay, what they release at a cap of 1.5·C. The cost is one layer of LLaMA2-7B
(benchmarks/workloads.py), the pipeline has four ranks, messages take no time; T/S is the simulated
step time over the step's work on one of them, 1 without any bubble. "Overhead" adds the forward
time of 1 % of C tokens of matrix products to every action on every stage. "Interleaved" has two
stages per rank. "Open" are the tokens of micro-batches between forward and backward on the
fullest rank.

``wlb``, ``balanced``, ``tapered`` and ``auto`` are the planner's packings; "tapered, no delay" is
``tapered`` with a budget of 0. ``unsliced`` is the best of many whole-piece plans, step by step:
longest first into M micro-batches, ten M from N to 8·N at a cap of C and of 1.5·C. ``slim M·N`` has
M MicroPacks for each of the N micro-batches. The asymmetric rows balance forward and backward
apart, in two executions: packs that run whole in both passes and compute nothing twice (no executor
does; a bound), and units with a graph each.

The integer program that defines the optimum of slicing is held against the fast construction on
small instances. Planning times are CPU times of plain Python.

Run ``python -m benchmarks.slimpack --help``. Prints tables and the targets, and then, as its last
line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from lightning_wlb.planning.merging import merge_pieces
from lightning_wlb.planning.slicing_milp import slice_pieces_milp
from rich.console import Console

from benchmarks.slimpack_plans import (
    PASSES,
    RANKS,
    TOTAL,
    Step,
    original,
    shard,
    steps_of,
    stream_of,
    unsliced,
    whole_packs,
    whole_pieces,
    work_of,
)
from benchmarks.slimpack_tables import Target, markdown, ratios, show, targets
from benchmarks.workloads import REFERENCE_WORK
from lightning_wlb.cost.flops import linear_flops
from lightning_wlb.plan import Piece, StepPlan
from lightning_wlb.planning import DataSettings, MeshSettings, Planner
from lightning_wlb.planning.asymmetric import slice_pieces_asymmetric
from lightning_wlb.planning.judge import PipelineJudge
from lightning_wlb.planning.packing.best_fit import pack as best_fit
from lightning_wlb.planning.replicas import asymmetric_replica_plan, replica_plan
from lightning_wlb.planning.slicing import share_packs, slice_pieces
from lightning_wlb.prediction.executed import units

SLIM = ((2, 1, 0), (2, 1.25, 0), (4, 1, 0), (2, 1.25, RANKS - 1), (4, 1, RANKS - 1))
PLANNED: dict[str, dict[str, Any]] = {  # row: settings, the cap in windows
    "wlb": {"packing": "wlb", "cap": 1.5},
    "balanced": {"packing": "balanced", "cap": 1.5},
    "tapered": {"packing": "tapered", "cap": 1},
    "tapered, no delay": {"packing": "tapered", "cap": 1, "delay_budget": 0},
    "auto": {"packing": "auto", "cap": 1},
}


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


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """The answer, and CPU seconds."""
    begin = time.process_time()
    made = make()
    return made, time.process_time() - begin


def measure(count: int, window: int, steps: int, seeds: Sequence[int]) -> dict[str, Method]:
    """Every method on the same batches."""
    methods: dict[str, Method] = {}

    def method(name: str) -> Method:
        return methods.setdefault(name, Method(name, window))

    best: list[list[float]] = []
    for seed in seeds:
        stream = stream_of(count, window, steps, seed)
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
                name = f"asymmetric {multiple}·N"
                method(name).add(whole_packs(forward, backward), pieces_count, slices, seconds)
                in_units = units(asymmetric_replica_plan(forward, backward, 0, shard), 1, 1)
                method(f"{name}, units").add(Step.of(in_units), pieces_count, slices)
        for name, given in PLANNED.items():
            planned(method(name), given, stream, count, steps)
    # Each schedule has its own best plan.
    unsliced_steps = methods["unsliced"].steps
    for row, (_, interleaved) in zip(unsliced_steps, best, strict=True):
        row[2] = interleaved
    return methods


def planned(
    method: Method, given: dict[str, Any], stream: np.ndarray, count: int, steps: int
) -> None:
    """A packing of the planner's; those that delay have steps of other tokens.

    It is told the schedule: what its interleaved steps take comes from a planner of its own.
    """
    window = method.window
    settings = {**given, "cap": int(given["cap"] * window)}
    data = DataSettings(window, count, shuffle=False, **settings)
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
    stream = stream_of(count, window, steps, seed)
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
        stream = stream_of(count, window, few, seed)
        ratios = []
        for pieces in steps_of(stream, count * window, few):
            dealt = merge_pieces(pieces, replicas_count, TOTAL, 0)
            packs = share_packs(dealt.loads, 4 * count)
            made = [
                Step.of(replica_plan(slice_pieces(own, m, window, TOTAL), 0, shard))
                for own, m in zip(dealt.own, packs, strict=True)
            ]
            longest = max(step.simulate()[0] * step.work for step in made)
            ratios.append(longest * replicas_count / sum(step.work for step in made))
        result[str(replicas_count)] = float(np.mean(ratios))
    return result


def integer_program(instances: int = 6, packs: int = 3) -> dict[str, float]:
    """Largest work of the fast construction over the integer program's, on small instances.

    Five pieces of at most 2,048 tokens, cuts at multiples of 64, slices of at least 128.
    """
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(instances):
        lengths = np.clip(np.exp(rng.normal(6, 1, 5)).astype(int), 64, 2048)
        pieces = [Piece(number, 0, int(tokens), 0) for number, tokens in enumerate(lengths)]
        fast, best = (
            max(sum(work_of(pack)) for pack in make(pieces, packs, 4096, TOTAL, tile=64, least=128))
            for make in (slice_pieces, slice_pieces_milp)
        )
        gaps.append(fast / best - 1)
    return {"mean": float(np.mean(gaps)), "max": max(gaps)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    rows: dict[str, dict[str, Any]] = {}
    compared: dict[str, dict[str, Any]] = {}
    for count in arguments.micro_batches:
        steps = max(arguments.steps * 4 // count, 1)
        made = measure(count, arguments.window, steps, arguments.seeds)
        rows |= {f"{count}/{name}": method.row() for name, method in made.items()}
        compared |= ratios(rows, count)
    by_replicas = replicas(
        arguments.window, arguments.steps, arguments.seeds[0], arguments.replicas
    )
    merged = merges(8 * arguments.window, max(arguments.steps // 4, 1), arguments.seeds[0])
    reached = targets(rows)
    for name in ("step", "step_interleaved"):
        if 16 in arguments.micro_batches:
            key = f"16/{name}, no delay"
            reached.append(
                Target(f"slim 4·N over unsliced, {key}", 0.92, compared[key]["slim 4·N"])
            )
    values = list(by_replicas.values())
    label = f"DP {arguments.replicas[-1]} over DP {arguments.replicas[0]}"
    reached.append(Target(label, 1.005, values[-1] / values[0]))
    for percent, bound in ((0, 1.02), (10, 1.13)):
        name = f"balance, {percent} % overhead"
        reached.append(Target(f"DP-Merge, {name}", bound, merged[name]["best alpha of each step"]))
    return {
        "benchmark": "slimpack",
        **{name: value for name, value in vars(arguments).items() if name != "save"},
        "rows": rows,
        "slices over the best unsliced": compared,
        "by_replicas": by_replicas,
        "merges": merged,
        "integer_program": integer_program(),
        "targets": [{**each._asdict(), "met": each.met} for each in reached],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slimpack", description=__doc__.split("\n")[0]
    )
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
    line = json.dumps(result)
    if arguments.save:
        arguments.save.with_suffix(".json").write_text(line + "\n")
        arguments.save.with_suffix(".md").write_text(markdown(result))
    print(line)


if __name__ == "__main__":
    main()
