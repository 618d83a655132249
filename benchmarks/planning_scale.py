"""What planning costs on 8 to 16,384 ranks: time of a step, size of its plan, process groups.

Nothing runs on these ranks. One process plans as every rank does, on lengths of Generator A, by
work and by a device profile, and times what a loader worker does for a step: the plan (its parts
apart: choosing and placing, its validation, its digest), the tensors of one rank but for reading
tokens, and the predicted step that all of it must hide behind. Process groups are made on torch's
``fake`` backend, which connects nobody: they are counted, and what the calls cost a rank is timed.

Times are the process's own CPU time, which is at least the wall-clock time of a core that nothing
else uses: a busy machine adds to it, so the least of some steps is reported. Predicted steps are
computed from the analytic profile of an H100, with the shardings estimated.

Run ``python -m benchmarks.planning_scale --help``. Prints a table and then, as its last line, one
JSON object.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import report
from benchmarks.workloads import documents_for, generator_a
from lightning_wlb.cost.attention_tiles import layers_kernel_cost
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.distributed.process_groups import mesh_groups
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages
from lightning_wlb.prediction.step_totals import ReplicaTotals, StepTotals

K = 1024
RESULTS = Path(__file__).with_name("results") / "planning_scale.json"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "planning_scale.png"
GROWING = "7b, 128K"
"""How the cases begin whose number of ranks grows."""


class Case(NamedTuple):
    """A model, a window and a mesh.

    Attributes:
        model: a preset of ``TransformerConfig``.
        window: C, in tokens.
        micro_batches: N.
        mesh: of all ranks.
    """

    model: str
    window: int
    micro_batches: int
    mesh: Mesh

    def __str__(self) -> str:
        axes = zip(("DP", "PP", "CP", "TP"), self.mesh.shape, strict=True)
        sizes = " × ".join(f"{name} {size}" for name, size in axes)
        return f"{self.model}, {self.window // K}K, N {self.micro_batches}, {sizes}"


CASES = (
    Case("7b", 128 * K, 4, Mesh(1, 2, 1, 4)),
    Case("7b", 128 * K, 4, Mesh(1, 8, 2, 4)),
    Case("7b", 128 * K, 16, Mesh(4, 8, 2, 4)),
    Case("7b", 128 * K, 64, Mesh(16, 8, 2, 4)),
    Case("7b", 128 * K, 256, Mesh(64, 8, 2, 4)),
    Case("7b", 128 * K, 1024, Mesh(256, 8, 2, 4)),
    Case("70b", 128 * K, 64, Mesh(8, 8, 2, 8)),
    Case("70b", 128 * K, 1024, Mesh(64, 8, 4, 8)),
    Case("7b", 1024 * K, 8, Mesh(4, 8, 8, 4)),
    Case("70b", 1024 * K, 128, Mesh(32, 8, 8, 8)),
)


@dataclass(frozen=True)
class Blank:
    """Documents of which only the lengths are real: reading is not what is measured."""

    lengths: np.ndarray
    vocab_size: int

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, np.int64)

    def mask(self, document: int, start: int, stop: int) -> None:
        return None


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of this process's CPU time, and the result."""
    gc.collect()
    begin = time.process_time()
    result = run()
    return 1e3 * (time.process_time() - begin), result


def predictor_of(case: Case, lengths: np.ndarray) -> Predictor:
    shape = TransformerConfig.preset(case.model).shape
    latency = LatencyModel(Profile.load("h100"), shape, case.mesh)
    mean_context = mean_context_of(lengths, case.window)
    return Predictor(latency, tuple(model_stages(shape, case.mesh.stages, mean_context)))


def planned(case: Case, steps: int, by: str, lengths: np.ndarray) -> dict[str, Any]:
    """Times of some steps, planned by work or by profile, and what the plans are like."""
    work = Work.of(TransformerConfig.preset(case.model).shape)
    predictor = predictor_of(case, lengths)
    data = DataSettings(case.window, case.micro_batches)
    by_profile = by == "profile"
    planner = Planner(
        lengths,
        data,
        work,
        case.mesh,
        kernel_cost=(
            predictor.latency.segment_cost
            if by_profile
            else partial(layers_kernel_cost, windows=work.total.windows)
        ),
        scorer=ProfileScorer(predictor) if by_profile else None,
    )
    store = Blank(lengths, 32_000)
    rows = []
    for _ in range(steps):
        release_ms, release = timed(planner.release)
        plan_ms, plan = timed(lambda release=release: planner.place(release))
        validation_ms, _ = timed(plan.validate)
        digest_ms, _ = timed(lambda plan=plan: plan.digest)
        batch_ms, _ = timed(
            lambda plan=plan: make_step_batch(plan, store, case.mesh.coordinate(0), {}, 0, False)
        )
        rows.append(
            {
                "plan_ms": release_ms + plan_ms,
                "of_which_release_ms": release_ms,
                "of_which_validation_ms": validation_ms,
                "digest_ms": digest_ms,
                "batch_of_a_rank_ms": batch_ms,
                "json_kb": len(plan.to_json()) / K,
                "pickle_kb": len(pickle.dumps(plan)) / K,
                "pieces": len(plan.pieces),
                "micro_batches": sum(len(each.forward) for each in plan.replicas),
            }
        )
    # The first step makes what all steps share.
    counted = rows[1:] or rows
    row = {name: min(each[name] for each in counted) for name in rows[0]}
    row["plan_ms_of_the_first"] = rows[0]["plan_ms"]
    totals = [
        ReplicaTotals(predictor, each, predictor.costs(each, estimated=True))
        for each in plan.replicas
    ]
    times = StepTotals(predictor, totals).times
    row["predicted_step_ms"] = times.total_ns / 1e6
    return {"case": str(case), "ranks": case.mesh.devices, "by": by, "steps": steps, **row}


def process_groups(mesh: Mesh) -> dict[str, Any]:
    """Process groups that a rank makes at set-up, and what the calls cost it without a network."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.devices)
    try:
        spent, _ = timed(lambda: mesh_groups(mesh.coordinate(0), torch.device("cpu"), None))
        made = len(dist.distributed_c10d._world.pg_map)
    finally:
        dist.destroy_process_group()
    return {"groups_of_a_rank": made, "groups_ms": spent}


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("planning_scale", __doc__)
    parser.add_argument(
        "--steps", type=int, default=4, help="of each case; the first is not counted"
    )
    parser.add_argument("--least-ranks", type=int, default=0, help="leave smaller cases out")
    parser.add_argument("--most-ranks", type=int, default=16_384, help="leave larger cases out")
    parser.add_argument("--by", nargs="+", choices=("work", "profile"), default=("work", "profile"))
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="where cases that are not run keep their rows"
    )
    parser.add_argument("--picture", type=Path, default=PICTURE, help="drawn of all rows")
    arguments = parser.parse_args(argv)
    rows = []
    for case in CASES:
        if not arguments.least_ranks <= case.mesh.devices <= arguments.most_ranks:
            continue
        documents = documents_for(2 * arguments.steps, case.micro_batches, case.window)
        lengths = generator_a(documents, case.window, 0)
        groups = process_groups(case.mesh)
        for by in arguments.by:
            row = planned(case, arguments.steps, by, lengths) | groups
            rows.append(
                {
                    key: round(each, 2) if isinstance(each, float) else each
                    for key, each in row.items()
                }
            )
    kept = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    ran = {row["case"] for row in rows}
    rows = sorted(
        [row for row in kept if row["case"] not in ran] + rows, key=lambda row: row["ranks"]
    )
    headings = [name.replace("_", " ") for name in rows[0]]
    cells = [[str(value) for value in row.values()] for row in rows]
    Console(width=220).print(report.table("Planning", headings, cells))
    draw(rows, arguments.picture)
    report.finish(
        {"benchmark": "planning_scale", "python": sys.version.split()[0], "rows": rows},
        arguments.output,
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the picture: how time, size and process groups grow with the ranks of one model."""
    figure = Figure(figsize=(15, 4.6), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    time_axis, size_axis, other_axis = figure.subplots(1, 3)
    growing = [row for row in rows if row["case"].startswith(GROWING)]
    for by, colour in (("work", "tab:blue"), ("profile", "tab:orange")):
        own = [row for row in growing if row["by"] == by]
        ranks = [row["ranks"] for row in own]

        def line(axis: Axes, name: str, label: str, style: str = "-") -> None:
            values = [row[name] for row in own]  # noqa: B023
            axis.plot(ranks, values, style, color=colour, marker="o", label=label)  # noqa: B023

        line(time_axis, "plan_ms", f"planned by {by}")
        line(size_axis, "pickle_kb", f"plan, planned by {by}")
        line(other_axis, "batch_of_a_rank_ms", f"tensors of a rank, planned by {by}")
        line(other_axis, "digest_ms", f"digest, planned by {by}", ":")
        if by == "profile":
            half = [row["predicted_step_ms"] / 2 for row in own]
            time_axis.plot(ranks, half, "--", color="grey", label="half of the predicted step")
            line(other_axis, "groups_ms", "process groups of a rank, without a network", "--")
    for axis, title, unit in (
        (time_axis, "Planning a step", "ms"),
        (size_axis, "Size of a plan", "KB"),
        (other_axis, "What else a rank does", "ms"),
    ):
        axis.set(title=title, xlabel="ranks", ylabel=unit, xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
