"""The default packing by a profile of this machine, and by exact work, against best-fit packing.

A small decoder whose work is mostly attention trains on definitions of Python's standard library,
as byte pairs, on two CPU ranks with one thread and a core each: as a pipeline of two stages, and as
two replicas. In each round one packing trains an epoch after the other, so that a drift of the
machine meets all of them:

* *best_fit*, the baseline;
* *auto, work*: the default, chosen by exact work;
* *auto*: by the profile that ``lightning-wlb profile`` measures of this machine.

The committed result was made when a run measured its devices by itself as it began, in at most 20
seconds; that is what its *auto* was planned by.

Steps are timed from the batch to the optimizer's update; planning is reported apart, since it runs
ahead in a loader worker. *replayed* are the processor times of the actions through the simulator,
without communication. A figure is the median over rounds, a ratio that of medians, best_fit's over
the other's: above 1 is faster than best_fit.

    python -m benchmarks.automatic_profile    # 9 minutes, an estimate
    python -m benchmarks.automatic_profile --quick --profile cpu    # figures of no use

Needs two cores and nothing else running. Prints a table and as its last line one JSON object.
"""

from __future__ import annotations

import os
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, replayed, train
from benchmarks.ranks import run_ranks
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.document_store import DocumentSubset
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import StepPlan
from lightning_wlb.profiling.device_profile import measure

VOCABULARY = 1024
CONFIG = TransformerConfig.preset("tiny", layers=4, heads=1, kv_heads=1, vocab_size=VOCABULARY)
MESHES = {"pipeline 2": Mesh(pipeline=2), "data 2": Mesh(data=2)}
PACKINGS = {"best_fit": "best_fit", "auto, work": "auto", "auto": "auto"}
FIGURES = {
    "wall_us_per_token": "wall clock (µs/token)",
    "with_planning_us_per_token": "  with planning in line",
    "replayed_us_per_token": "  replayed CPU times",
    "bubble": "  share of it without work",
    "micro_batches": "  micro-batches of a replica",
}


def documents() -> StdlibDocuments:
    """All documents."""
    return StdlibDocuments(tokenizer="bpe", vocab_size=VOCABULARY)


def chosen(seed: int, tokens: int) -> DocumentSubset:
    """At least ``tokens`` tokens of documents chosen at random."""
    store = documents()
    order = np.random.default_rng(seed).permutation(len(store.lengths))
    enough = int(np.searchsorted(np.cumsum(store.lengths[order]), tokens)) + 1
    return DocumentSubset(store, order[:enough])


def train_rank(
    rank: int, mesh: Mesh, profile: Profile, options: dict[str, int]
) -> dict[str, list[list[RankStep]]]:
    """The steps of every packing's epochs on this rank."""
    result: dict[str, list[list[RankStep]]] = defaultdict(list)
    for seed in range(options["rounds"]):
        subset = chosen(seed, options["tokens"])
        for name, packing in PACKINGS.items():
            data = WLBDataModule(
                subset,
                context_window=options["window"],
                micro_batches=options["micro_batches"],
                packing=packing,
                seed=seed,
                profile=profile if name == "auto" else "none",
                num_workers=0,  # the ranks may not have children
            )
            result[name].append(train(CONFIG, mesh, data, max_epochs=1))
    return result


def figures(epoch: list[list[RankStep]], mesh: Mesh) -> dict[str, float]:
    """One epoch of one packing; ``epoch`` by rank, then step."""
    steps = list(zip(*epoch, strict=True))
    plans = [StepPlan.from_json(each[0].plan) for each in steps]
    tokens = sum(plan.tokens for plan in plans)
    walls = [max(rank.wall for rank in each) for each in steps]
    ran = [
        replayed(mesh, plan, [rank.compute for rank in each])
        for plan, each in zip(plans, steps, strict=True)
    ]
    compute_ns = sum(max(each.compute_ns for each in of_step) for of_step in ran)
    busy_ns = sum(sum(each.busy_ns) for of_step in ran for each in of_step)
    counts = [len(replica.forward) for plan in plans for replica in plan.replicas]
    first, last = epoch[0][0], epoch[0][-1]
    return {
        "tokens": tokens,
        "steps": len(plans),
        "wall_us_per_token": 1e6 * sum(walls) / tokens,
        "with_planning_us_per_token": 1e6 * (last.begin + last.wall - first.begin) / tokens,
        "replayed_us_per_token": compute_ns / 1e3 / tokens,
        "cpu_us_per_token": busy_ns / 1e3 / tokens,
        "bubble": 1 - busy_ns / (mesh.devices * compute_ns),
        "micro_batches": sum(counts) / len(counts),
        "delay": sum(plan.delay * plan.tokens for plan in plans) / tokens,
    }


def measured(mesh: Mesh, profile: Profile, options: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Medians over rounds for each packing, and the wall clock of every round."""
    by_rank = run_ranks(train_rank, 2, mesh, profile, options, timeout=1800, process_group=False)
    return over_rounds(by_rank, mesh, options["rounds"])


def over_rounds(
    by_rank: list[dict[str, list[list[RankStep]]]], mesh: Mesh, rounds: int
) -> dict[str, dict[str, Any]]:
    """Medians over rounds for each packing and the wall clock of every round."""
    result: dict[str, dict[str, Any]] = {}
    for packing in by_rank[0]:
        every = [
            figures([rank[packing][number] for rank in by_rank], mesh) for number in range(rounds)
        ]
        result[packing] = {name: median(each[name] for each in every) for name in every[0]}
        of_rounds = [each["wall_us_per_token"] for each in every]
        result[packing]["wall_us_per_token_by_round"] = of_rounds
    return result


def main(argv: list[str] | None = None) -> None:
    numbers = {"rounds": 5, "tokens": 200_000, "window": 8192}
    parser = report.measured_parser("automatic_profile", __doc__, **numbers)
    add = parser.add_argument
    add("--profile", help="in place of one that is measured: a name or a file")
    add("--quick", action="store_true", help="a round of few tokens")
    arguments = parser.parse_args(argv)
    options = report.numbers_of(arguments)
    if arguments.quick:
        options |= {"rounds": 1, "tokens": 16_000, "window": 2048}
    documents()  # tokenised once, before the ranks ask for it
    if arguments.profile:
        profile = Profile.load(arguments.profile)
    else:
        cpu = torch.device("cpu")
        torch.set_num_threads(1)
        profile = measure(CONFIG, name="here", device=cpu, dtype=torch.float32)
    runs = {name: measured(mesh, profile, options) for name, mesh in MESHES.items()}
    rows = [
        [f"{run}: {label.strip()}", *(f"{runs[run][each][name]:,.4g}" for each in PACKINGS)]
        for run in runs
        for name, label in FIGURES.items()
    ]
    ratios = {
        run: {
            each: {
                name: of["best_fit"][name] / of[each][name]
                for name in FIGURES
                if name.endswith("per_token")
            }
            for each in PACKINGS
        }
        for run, of in runs.items()
    }
    Console(width=120).print(report.table("The same documents", ["", *PACKINGS], rows))
    made = {
        "benchmark": "automatic_profile",
        "cores": os.cpu_count(),
        "profile": profile.provenance,
        "settings": {**options, "layers": CONFIG.layers, "dim": CONFIG.dim, "heads": CONFIG.heads},
        "ratios": ratios,
        "runs": runs,
    }
    report.finish(made, arguments.output)


if __name__ == "__main__":
    main()
