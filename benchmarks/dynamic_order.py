"""Whether strategies take as long, beside each other, as they are simulated to: on CPU ranks.

A small decoder trains on Python's standard library, as bytes, with one thread on each rank. First
the device is measured. Then the same first steps run on the mesh, and all of them on each strategy
of a pool, whatever a run would choose; in each round one after the other, and once more in reverse,
so that a machine that slows down slows all of them. The first step of each turn is left out.

* *2 ranks*: a pipeline of two; two single ranks, two context-parallel, two tensor-parallel ones.
* *4 ranks*: two tensor-parallel pairs; one pair beside two single ranks, of each kind of pair, and
  four single ranks.

The time of a step is that with a core for each rank, from processor time, which other programs and
ranks on the same core do not change: the length of its schedule with each action's own processor
time, and what the busiest rank's process needs besides. The time in which a message travels is
left out, in what is simulated beside it too. The wall clock of the slowest rank is given where
there is a core for each, beside a simulation with messages. Both are medians over turns.

Two ways to run a step are *told apart* where one is simulated to take :data:`CLEARLY` of the time
of the other, or less. *Agree* is how many of these pairs have the same order when executed. Those
in which one of the two is the mesh are also counted apart, since by them a step leaves it. *Lost*
is what the way that is simulated to be best takes over the best executed one, over all steps.

Run ``python -m benchmarks.dynamic_order --help``. Prints a table and as its last line one JSON
object. Nothing else should run on the machine.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, replayed, train
from benchmarks.paper_speedups import without_communication
from benchmarks.ranks import run_ranks
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import described
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import name_of
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import Scheme, Schemes, StepPlan
from lightning_wlb.planning import planner
from lightning_wlb.planning.step_chooser import PlannedStep
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages
from lightning_wlb.profiling.device_profile import measure

CONFIG = TransformerConfig.preset("tiny", dim=128, layers=4, ffn_dim=352)
CLEARLY = 0.97
"""Simulated time over that of another way, below which the two are told apart."""


def pair(first: int, kind: str) -> Scheme:
    """Two ranks that are a pipeline, or share tokens or weights."""
    if kind == "pipeline":
        return Scheme(first, (2, 2))
    return Scheme(first, (4,), **{kind: 2})


SINGLE = tuple(Scheme(rank, (4,)) for rank in range(4))
SETTINGS: dict[str, tuple[Mesh, tuple[Schemes, ...]]] = {
    "2 ranks": (
        Mesh(pipeline=2),
        (SINGLE[:2], (pair(0, "context"),), (pair(0, "tensor"),)),
    ),
    "4 ranks": (
        Mesh(data=2, tensor=2),
        (
            SINGLE,
            *((pair(0, kind), *SINGLE[2:]) for kind in ("tensor", "context", "pipeline")),
        ),
    ),
}


def always(steps: Sequence[PlannedStep], *mesh: Any) -> PlannedStep:
    """In place of :func:`.fastest`: the only strategy, whatever is simulated."""
    (arranged,) = steps
    return arranged


def train_rank(
    rank: int, mesh: Mesh, ways: Sequence[Schemes], profile: Profile, options: dict[str, int]
) -> list[list[list[RankStep]]]:
    """[ways][turns][steps] on this rank; a way without a strategy is the mesh."""
    planner.fastest = always
    turns: dict[int, list[list[RankStep]]] = defaultdict(list)
    order = list(range(len(ways)))
    for number in (order + order[::-1]) * options["rounds"]:
        data = WLBDataModule(
            StdlibDocuments(),
            context_window=options["window"],
            micro_batches=options["micro_batches"],
            profile=profile,
            num_workers=0,
        )
        way = ways[number]
        dynamic = (way,) if way else "off"
        steps = train(CONFIG, mesh, data, dynamic=dynamic, max_steps=options["steps"] + 1)
        turns[number].append(steps[1:])
    return [turns[number] for number in order]


def executed(mesh: Mesh, turns: Sequence[Sequence[Sequence[RankStep]]], wall: bool) -> list[int]:
    """What each step took, in ns; ``turns`` by rank, turn and step."""
    times = []
    for of_step in zip(*(zip(*of_rank, strict=True) for of_rank in turns), strict=True):
        found = [
            max(rank.wall for rank in ranks) if wall else processor_seconds(mesh, ranks)
            for ranks in zip(*of_step, strict=True)
        ]
        times.append(round(median(found) * 1e9))
    return times


def processor_seconds(mesh: Mesh, ranks: Sequence[RankStep]) -> float:
    """What a step takes with a core for each rank."""
    plan = StepPlan.from_json(ranks[0].plan)
    ran = replayed(mesh, plan, [rank.compute for rank in ranks])
    beside = [rank.cpu - sum(seconds for _, seconds in rank.compute) for rank in ranks]
    return max(one.compute_ns for one in ran) / 1e9 + max(beside)


def simulated(base: Predictor, plans: Sequence[StepPlan]) -> list[int]:
    """What each step is simulated to take."""
    found = []
    for plan in plans:
        if plan.schemes:
            found.append(Pool.of([plan.schemes], base).predict(plan, base).total_ns)
        else:
            found.append(base.predict(plan).total_ns)
    return found


def agreement(said: Sequence[Sequence[int]], took: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How the order of ways by simulation is that of execution.

    Args:
        said: of each way, the mesh first, what each step is simulated to take.
        took: likewise, what it took.
    """
    result: dict[str, Any] = {}
    for name, pairs in (
        ("of_mesh", [(0, way) for way in range(1, len(said))]),
        ("of_all", list(combinations(range(len(said)), 2))),
    ):
        apart = right = 0
        for one, other in pairs:
            for step in range(len(said[0])):
                fast, slow = sorted((one, other), key=lambda way: said[way][step])
                if said[fast][step] <= CLEARLY * said[slow][step]:
                    apart += 1
                    right += took[fast][step] < took[slow][step]
        result[name] = {"told_apart": apart, "agree": right}
    chosen = least = 0
    for of_said, of_took in zip(zip(*said, strict=True), zip(*took, strict=True), strict=True):
        chosen += of_took[of_said.index(min(of_said))]
        least += min(of_took)
    return result | {"lost_percent": round(100 * (chosen / least - 1), 2)}


def measured(name: str, profile: Profile, options: dict[str, int]) -> dict[str, Any]:
    """All ways of a setting, simulated and executed."""
    mesh, strategies = SETTINGS[name]
    ranks = mesh.devices
    profile = replace(profile, devices_per_node=ranks)
    ways: tuple[Schemes, ...] = ((), *strategies)
    arguments = mesh, ways, profile, options
    by_rank = run_ranks(train_rank, ranks, *arguments, timeout=3600, process_group=False)
    lengths = np.asarray(StdlibDocuments().lengths)
    context = mean_context_of(lengths, options["window"])
    stages = tuple(model_stages(CONFIG.shape, mesh.pipeline, context))
    profiles = {"processor": without_communication(profile)}
    if ranks <= (os.cpu_count() or 1):
        profiles["wall"] = profile
    made: dict[str, Any] = {}
    rows: list[dict[str, Any]] = [
        {"way": described(way) if way else f"the mesh {name_of(mesh)}"} for way in ways
    ]
    for clock, each in profiles.items():
        base = Predictor(LatencyModel(each, CONFIG.shape, mesh), stages)
        said, took = [], []
        for number in range(len(ways)):
            turns = [rank[number] for rank in by_rank]
            plans = [StepPlan.from_json(step.plan) for step in turns[0][0]]
            said.append(simulated(base, plans))
            took.append(executed(mesh, turns, clock == "wall"))
        made[clock] = agreement(said, took)
        for name, times in ((f"simulated_{clock}", said), (clock, took)):
            for row, of_way in zip(rows, times, strict=True):
                row[f"{name}_over_mesh"] = round(sum(of_way) / sum(times[0]), 4)
                row[f"{name}_ms"] = [round(one / 1e6, 2) for one in of_way]
    return {**made, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("dynamic_order", __doc__)
    add = parser.add_argument
    add("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="default: all")
    add("--profile", help="in place of one that is measured: a name or a file")
    add("--rounds", type=int, default=1, help="in each every way runs twice")
    add("--steps", type=int, default=4, help="of a turn, beside the first")
    add("--window", type=int, default=4096)
    add("--micro-batches", type=int, default=4, help="N of a global batch")
    add("--output", type=Path, help="where to write the JSON object too")
    arguments = parser.parse_args(argv)
    options = {
        name: getattr(arguments, name) for name in ("rounds", "steps", "window", "micro_batches")
    }
    if arguments.profile:
        profile = Profile.load(arguments.profile)
    else:
        cpu = torch.device("cpu")
        torch.set_num_threads(1)
        profile = measure(CONFIG, name="here", device=cpu, dtype=torch.float32)
    runs = {name: measured(name, profile, options) for name in arguments.settings}
    for name, run in runs.items():
        pairs = run["processor"]["of_all"]
        title = f"{name}: {pairs['agree']} of {pairs['told_apart']} pairs in the simulated order"
        figures = [each for each in run["rows"][0] if each.endswith("_over_mesh")]
        cells = [[row["way"], *(f"{row[each]:.3f}" for each in figures)] for row in run["rows"]]
        headings = ["steps on", *(each.replace("_", " ") for each in figures)]
        Console(width=120).print(report.table(title, headings, cells))
    made = {
        "benchmark": "dynamic_order",
        "cores": os.cpu_count(),
        "profile": profile.provenance,
        "settings": {**options, "layers": CONFIG.layers, "dim": CONFIG.dim},
        "runs": runs,
    }
    report.finish(made, arguments.output)


if __name__ == "__main__":
    main()
