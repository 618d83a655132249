"""The mesh that ``strategy="wlb"`` chooses against every other legal one, measured on CPU ranks.

A small decoder trains on Python's standard library, as bytes, on 2 and on 4 ranks with one thread
each. The mesh is searched for as a run without sizes does, with the profile given. Then every legal
mesh trains the same first steps of the same documents, planned by that profile, one mesh after the
other, and in each round once more in reverse, so that a machine that slows down slows all of them.
The first step of each turn is left out.

What is compared is the time of a step with a core for each rank, per token, from processor time,
which other programs and ranks on the same core do not change: the length of the step's schedule
with each action's own processor time, and what the busiest rank's process needs besides (messages,
parameters and gradients on their way, the optimizer). The time in which a message travels is left
out. The wall clock of the slowest rank stands beside it; with more ranks than cores a rank that
waits leaves its core to another one, so that the wall clock does not show bubbles and imbalance.
Ratios are taken within a round, mesh over chosen one; of several rounds the median.

Run ``python -m benchmarks.chosen_mesh --help``. Prints a table and as its last line one JSON
object. Nothing else should run on the machine.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, replayed, train
from benchmarks.ranks import run_ranks
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh, legal_meshes
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning import DataSettings

CONFIG = TransformerConfig.preset("tiny", layers=4)


def request_of(ranks: int, profile: Profile, settings: DataSettings) -> MeshRequest:
    """What a run on so many ranks of one node asks for."""
    return MeshRequest(
        lengths=np.asarray(StdlibDocuments().lengths),
        shape=CONFIG.shape,
        data=settings,
        profile=profile,
        devices=ranks,
        devices_per_node=ranks,
    )


def train_rank(
    rank: int, meshes: Sequence[Mesh], request: MeshRequest, rounds: int, steps: int
) -> list[dict[Mesh, list[RankStep]]]:
    """The steps of each mesh on this rank, in every round."""
    result = []
    for _ in range(rounds):
        ran: dict[Mesh, list[RankStep]] = defaultdict(list)
        for mesh in (*meshes, *reversed(meshes)):
            data = WLBDataModule(
                StdlibDocuments(),
                context_window=request.data.context_window,
                micro_batches=request.data.micro_batches,
                profile=request.profile,
                num_workers=0,
            )
            schedule = request.schedule_of(mesh)
            ran[mesh] += train(CONFIG, mesh, data, schedule=schedule, max_steps=steps)[1:]
        result.append(dict(ran))
    return result


class Times(NamedTuple):
    """µs per token of a turn: from processor time, and by the wall clock."""

    processor: float
    wall: float


def times_of(mesh: Mesh, schedule: str, steps: Sequence[Sequence[RankStep]]) -> Times:
    """How long a mesh has taken for its steps; ``steps`` by rank, then step."""
    tokens, processor, wall = 0, 0.0, 0.0
    for ranks in zip(*steps, strict=True):
        plan = StepPlan.from_json(ranks[0].plan)
        tokens += plan.tokens
        wall += max(rank.wall for rank in ranks)
        ran = replayed(mesh, plan, [rank.compute for rank in ranks], schedule)
        processor += ran[0].compute_ns / 1e9
        processor += max(rank.cpu - sum(seconds for _, seconds in rank.compute) for rank in ranks)
    return Times(1e6 * processor / tokens, 1e6 * wall / tokens)


def compared(
    rounds: Sequence[dict[Mesh, Times]], chosen: Mesh, predicted: dict[Mesh, float]
) -> dict[str, Any]:
    """Every mesh against the chosen one.

    Args:
        rounds: times of every mesh in each round.
        chosen: the mesh that was chosen.
        predicted: µs per token of every mesh.
    """
    rows = []
    for mesh in rounds[0]:
        ratios = [times[mesh].processor / times[chosen].processor for times in rounds]
        rows.append(
            {
                "mesh": name_of(mesh),
                "predicted_us_per_token": predicted[mesh],
                "us_per_token": median(times[mesh].processor for times in rounds),
                "over_chosen": median(ratios),
                "over_chosen_least": min(ratios),
                "over_chosen_most": max(ratios),
                "wall_us_per_token": median(times[mesh].wall for times in rounds),
                "wall_over_chosen": median(
                    times[mesh].wall / times[chosen].wall for times in rounds
                ),
            }
        )
    rows.sort(key=lambda row: row["over_chosen"])
    place = [row["mesh"] for row in rows].index(name_of(chosen)) + 1
    return {"chosen": name_of(chosen), "place": place, "of": len(rows), "rows": rows}


def measured(ranks: int, profile: Profile, settings: DataSettings, options: Any) -> dict[str, Any]:
    """The chosen mesh of so many ranks and all others, measured."""
    request = request_of(ranks, profile, settings)
    chosen = choose_mesh(request).best.mesh
    meshes = legal_meshes(request)
    rows = {mesh: evaluate(request, mesh).row for mesh in meshes}
    predicted = {mesh: row.steps_ns / 1e3 / row.tokens for mesh, row in rows.items()}
    arguments = meshes, request, options.rounds, options.steps
    by_rank = run_ranks(train_rank, ranks, *arguments, timeout=3600, process_group=False)
    rounds = [
        {
            mesh: times_of(
                mesh, request.schedule_of(mesh), [rank[number][mesh] for rank in by_rank]
            )
            for mesh in meshes
        }
        for number in range(options.rounds)
    ]
    shared = ranks > (os.cpu_count() or 1)
    return {"shared_cores": shared, **compared(rounds, chosen, predicted)}


def main(argv: list[str] | None = None) -> None:
    parser = report.measured_parser("chosen_mesh", __doc__, rounds=3, steps=3, window=2048)
    add = parser.add_argument
    add("--ranks", default="2,4", help="numbers of ranks")
    add("--profile", default="cpu", help="by which the mesh is chosen and steps are planned")
    arguments = parser.parse_args(argv)
    settings = DataSettings(arguments.window, arguments.micro_batches)
    profile = Profile.load(arguments.profile)
    numbers = [int(each) for each in arguments.ranks.split(",")]
    runs = {
        str(ranks): measured(ranks, replace(profile, devices_per_node=ranks), settings, arguments)
        for ranks in numbers
    }
    headings = ["mesh", "µs/token", "over the chosen", "from", "to", "predicted", "wall", "over"]
    for ranks, run in runs.items():
        title = f"{ranks} ranks: {run['chosen']} was chosen, place {run['place']} of {run['of']}"
        cells = [
            [row["mesh"], *(f"{value:.2f}" for value in (
                row["us_per_token"], row["over_chosen"], row["over_chosen_least"],
                row["over_chosen_most"], row["predicted_us_per_token"],
                row["wall_us_per_token"], row["wall_over_chosen"],
            ))]
            for row in run["rows"]
        ]  # fmt: skip
        Console(width=110).print(report.table(title, headings, cells))
    made = {
        "benchmark": "chosen_mesh",
        "cores": os.cpu_count(),
        "profile": profile.provenance,
        "settings": report.numbers_of(arguments),
        "runs": runs,
    }
    report.finish(made, arguments.output)


if __name__ == "__main__":
    main()
