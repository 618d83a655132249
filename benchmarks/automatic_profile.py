"""The default packing by a profile of this machine, and by exact work, against best-fit packing.

Two CPU ranks with one thread and a core each train the same documents as in
``benchmarks.slimpack_measured``: as a pipeline of two stages, and as two replicas. In each round
one packing trains an epoch after the other, so that a drift of the machine meets all of them:

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
from typing import Any

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, train
from benchmarks.ranks import run_ranks
from benchmarks.slimpack_measured import CONFIG, chosen, documents, over_rounds
from lightning_wlb.cli.profile import measured_profile
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.mesh import Mesh

MESHES = {"pipeline 2": Mesh(pipeline=2), "data 2": Mesh(data=2)}
PACKINGS = {"best_fit": "best_fit", "auto, work": "auto", "auto": "auto"}
FIGURES = {
    "wall_us_per_token": "wall clock (µs/token)",
    "with_planning_us_per_token": "  with planning in line",
    "replayed_us_per_token": "  replayed CPU times",
    "bubble": "  share of it without work",
    "micro_batches": "  micro-batches of a replica",
}


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


def measured(mesh: Mesh, profile: Profile, options: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Medians over rounds for each packing, and the wall clock of every round."""
    by_rank = run_ranks(train_rank, 2, mesh, profile, options, timeout=1800, process_group=False)
    return over_rounds(by_rank, mesh, options["rounds"])


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
        profile = measured_profile(CONFIG, name="here", device=cpu, dtype=torch.float32)
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
