"""Best-fit packing, WLB and auto on the same documents: time per token and activations, measured.

A small decoder whose work is mostly attention trains on Python's standard library (definitions as
byte pairs, about 10 million tokens), on a pipeline of CPU ranks with one thread each:

* *pipeline 2, wall clock*, one core per rank. In each round every packing trains one epoch of the
  same documents, one packing after the other, so that a drift of the machine meets all of them.
  An epoch ends when nothing waits, so all have trained the same tokens. Steps are timed from the
  batch to the optimizer's update; planning is reported apart (in training it runs ahead in a
  loader worker).
* *pipeline 2, replayed* and *pipeline 4, replayed*: every action's own CPU time through the
  simulator, on the programs that ran; communication, reduction and optimizer left out. Valid on
  any number of cores.
* *activations*: most bytes that a rank holds between forward and backward in a step, counted by
  the executor in an epoch of its own.

A figure of a packing is the median over rounds; ratios are of medians, first packing over this.

Run ``python -m benchmarks.slimpack_measured --help``. Prints a table and as its last line one JSON
object. Wall clocks need two cores and nothing else running.
"""

from __future__ import annotations

import os
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, replayed, train
from benchmarks.ranks import run_ranks
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.document_store import DocumentSubset
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import StepPlan

VOCABULARY = 1024
BY_PROFILE = ", profile"  # after the name of a packing that chooses by predicted times
CONFIG = TransformerConfig.preset("tiny", layers=4, heads=1, kv_heads=1, vocab_size=VOCABULARY)


def documents() -> StdlibDocuments:
    """All documents."""
    return StdlibDocuments(unit="definition", tokenizer="bpe", vocab_size=VOCABULARY)


def chosen(seed: int, tokens: int) -> DocumentSubset:
    """At least ``tokens`` tokens of documents chosen at random."""
    store = documents()
    order = np.random.default_rng(seed).permutation(len(store.lengths))
    enough = int(np.searchsorted(np.cumsum(store.lengths[order]), tokens)) + 1
    return DocumentSubset(store, order[:enough])


def train_rank(
    rank: int,
    ranks: int,
    packings: list[str],
    options: dict[str, int],
    counted: bool,
    profile: str | None,
) -> dict[str, list[list[RankStep]]]:
    """The steps of every packing's epochs on this rank."""
    result: dict[str, list[list[RankStep]]] = defaultdict(list)
    for seed in range(options["rounds"]):
        subset = chosen(seed, options["tokens"])
        for packing in packings:
            data = WLBDataModule(
                subset,
                context_window=options["window"],
                micro_batches=options["micro_batches"],
                packing=packing.removesuffix(BY_PROFILE),
                seed=seed,
                profile=profile if packing.endswith(BY_PROFILE) else "none",
                num_workers=0,
            )
            steps = train(CONFIG, Mesh(pipeline=ranks), data, counted=counted, max_epochs=1)
            result[packing].append(steps)
    return result


def figures(epoch: list[list[RankStep]], mesh: Mesh) -> dict[str, float]:
    """One epoch of one packing; ``epoch`` by rank, then step."""
    steps = list(zip(*epoch, strict=True))
    plans = [StepPlan.from_json(each[0].plan) for each in steps]
    tokens = sum(plan.tokens for plan in plans)
    walls = [max(rank.wall for rank in each) for each in steps]
    if epoch[0][0].held:
        peaks = [max(max(rank.held) for rank in each) for each in steps]
        return {"peak_bytes": max(peaks), "peak_bytes_median_step": median(peaks)}
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


def measured(
    ranks: int,
    packings: list[str],
    options: dict[str, int],
    profile: str | None,
    counted: bool = False,
) -> dict[str, dict[str, Any]]:
    """Medians over rounds for each packing."""
    arguments = ranks, packings, options, counted, profile
    by_rank = run_ranks(train_rank, ranks, *arguments, timeout=1800, process_group=False)
    return over_rounds(by_rank, Mesh(pipeline=ranks), options["rounds"])


def over_rounds(
    by_rank: list[dict[str, list[list[RankStep]]]], mesh: Mesh, rounds: int
) -> dict[str, dict[str, Any]]:
    """Medians over rounds for each packing, and the wall clock of every round where it is timed."""
    result: dict[str, dict[str, Any]] = {}
    for packing in by_rank[0]:
        every = [
            figures([rank[packing][number] for rank in by_rank], mesh) for number in range(rounds)
        ]
        result[packing] = {name: median(each[name] for each in every) for name in every[0]}
        if "wall_us_per_token" in every[0]:
            of_rounds = [each["wall_us_per_token"] for each in every]
            result[packing]["wall_us_per_token_by_round"] = of_rounds
    return result


def main(argv: list[str] | None = None) -> None:
    numbers = {"rounds": 5, "tokens": 200_000, "window": 8192}
    parser = report.measured_parser("slimpack_measured", __doc__, **numbers)
    add = parser.add_argument
    add("--packings", default="best_fit,wlb,auto", help="the first is the baseline")
    add(
        "--profile",
        help="of this machine and model (`lightning-wlb profile`): auto once more, choosing by it",
    )
    arguments = parser.parse_args(argv)
    packings, profile = arguments.packings.split(","), arguments.profile
    if profile:
        packings.append("auto" + BY_PROFILE)
    documents()  # tokenised once, before the ranks ask for it
    options = report.numbers_of(arguments)
    once = {**options, "rounds": 1}
    held = measured(2, packings, once, profile, counted=True)
    runs = {
        "pipeline 2": measured(2, packings, options, profile),
        "pipeline 4": measured(4, packings, once, profile),
    }
    for packing in packings:
        runs["pipeline 2"][packing].update(held[packing])
    rows = [
        ("pipeline 2, wall clock (µs/token)", "pipeline 2", "wall_us_per_token"),
        ("  with planning in line", "pipeline 2", "with_planning_us_per_token"),
        ("pipeline 2, replayed CPU times", "pipeline 2", "replayed_us_per_token"),
        ("pipeline 4, replayed CPU times", "pipeline 4", "replayed_us_per_token"),
        ("peak of activations (bytes)", "pipeline 2", "peak_bytes"),
        ("  of the median step", "pipeline 2", "peak_bytes_median_step"),
    ]
    ratios: dict[str, dict[str, float]] = {}
    cells = []
    for label, run, name in rows:
        values = [runs[run][packing][name] for packing in packings]
        ratios[label.strip()] = {
            packing: values[0] / value for packing, value in zip(packings, values, strict=True)
        }
        cells.append(
            [
                label,
                *(f"{value:,.4g}" if value < 1e5 else f"{value:,.0f}" for value in values),
                *(f"{values[0] / value:.3f}" for value in values[1:]),
            ]
        )
    headings = ["", *packings, *(f"{packings[0]} / {each}" for each in packings[1:])]
    Console(width=140).print(report.table("Measured, the same documents", headings, cells))
    made = {
        "benchmark": "slimpack_measured",
        "cores": os.cpu_count(),
        "settings": {**options, "layers": CONFIG.layers, "dim": CONFIG.dim, "heads": CONFIG.heads},
        "ratios": ratios,
        "runs": runs,
    }
    report.finish(made, arguments.output)


if __name__ == "__main__":
    main()
