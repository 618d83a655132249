"""What it costs that steps could leave the mesh, where none of them does.

Two CPU ranks with one thread and a core each train the same documents as a pipeline of two stages,
with ``dynamic="off"`` and with a strategy, two ranks apart, that no gain is ever enough for. Both
have the same plans. In each round one follows the other, in turns, so that a drift of the machine
meets both. A figure is the median, over all steps of all rounds, of a step with the strategy over
the same step without:

* *wall clock*: from the batch to the optimizer's update;
* *processor time*: likewise, of rank 0;
* *with planning in line*: from a batch to the next one. The strategy is planned in every step,
  which runs ahead in a loader worker otherwise.

    python -m benchmarks.dynamic_off

Needs two cores and nothing else running. Prints a table and as its last line one JSON object.
"""

from __future__ import annotations

import os
from itertools import pairwise
from statistics import median, quantiles
from unittest import mock

from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, train
from benchmarks.ranks import run_ranks
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.heterogeneous.planning import pool
from lightning_wlb.heterogeneous.setup import Dynamic
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import Scheme

CONFIG = TransformerConfig.preset("tiny")
MESH = Mesh(pipeline=2)
APART = [[Scheme(rank, (CONFIG.layers,)) for rank in range(2)]]
FIGURES = {
    "wall": "wall clock",
    "cpu": "processor time",
    "with_planning": "with planning in line",
}


def train_rank(rank: int, options: dict[str, int]) -> list[list[list[RankStep]]]:
    """The steps of every round, without a strategy and with one."""

    def steps(seed: int, dynamic: Dynamic) -> list[RankStep]:
        data = WLBDataModule(
            "stdlib",
            context_window=options["window"],
            micro_batches=options["micro_batches"],
            profile="cpu",
            seed=seed,
            num_workers=0,  # the ranks may not have children
        )
        return train(CONFIG, MESH, data, max_steps=options["steps"], dynamic=dynamic)

    rounds = []
    with mock.patch.object(pool, "WORTH_PER_MILLE", 1000):
        for seed in range(options["rounds"]):
            sides = ("off", APART) if seed % 2 else (APART, "off")
            made = [steps(seed, side) for side in sides]
            rounds.append(made if seed % 2 else made[::-1])
    return rounds


def ratios(rounds: list[list[list[RankStep]]]) -> dict[str, list[float]]:
    """Time with the strategy over time without, for every step but the first of a fit."""
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for off, on in rounds:
        if [step.plan for step in off] != [step.plan for step in on]:
            raise RuntimeError("a step has left the mesh: there is nothing to compare")
        pairs = list(zip(off, on, strict=True))[1:]
        for name in ("wall", "cpu"):
            found[name] += [getattr(on, name) / getattr(off, name) for off, on in pairs]
        found["with_planning"] += [
            (later[1].begin - earlier[1].begin) / (later[0].begin - earlier[0].begin)
            for earlier, later in pairwise(pairs)
        ]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = report.measured_parser("dynamic_off", __doc__, rounds=10, steps=20, window=2048)
    arguments = parser.parse_args(argv)
    options = report.numbers_of(arguments)
    rounds, _ = run_ranks(train_rank, 2, options, timeout=1800, process_group=False)
    found = ratios(rounds)
    spread = {name: quantiles(each, n=4) for name, each in found.items()}
    rows = [
        [label, f"{median(found[name]):.4f}", f"{spread[name][0]:.4f}", f"{spread[name][2]:.4f}"]
        for name, label in FIGURES.items()
    ]
    headings = ["of a step", "median", "first quartile", "third quartile"]
    Console(width=100).print(report.table("With a strategy over without", headings, rows))
    made = {
        "benchmark": "dynamic_off",
        "cores": os.cpu_count(),
        "settings": {**options, "layers": CONFIG.layers, "dim": CONFIG.dim},
        "steps": len(found["wall"]),
        "wall_ms_off": 1000 * median(step.wall for off, _ in rounds for step in off[1:]),
        "ratios": {name: median(each) for name, each in found.items()},
        "quartiles": {name: [each[0], each[2]] for name, each in spread.items()},
    }
    report.finish(made, arguments.output)


if __name__ == "__main__":
    main()
