"""Hydraulis' two-stage assignment (its §6) beside ours, for pipelines that are all alike.

*Dealing*: documents of a step to replicas by the paper's integer program (Equation 3, as far as the
solver gets in its nodes), by its Algorithm 1, and by work, longest first, as the package does where
no document is shared. Each is given by its largest bound (Equation 2) over what no dealing is
below: an even share of the work, or the pipeline that has the costliest document alone.

*Steps*: the predicted step on a fixed mesh with best-fit packing, with both stages of Hydraulis and
with ``auto``, planned by exact work and by the profile; beside it the time to plan a step, in
seconds of a core, all replicas together.

Settings and documents are those of :mod:`benchmarks.meshes`; the device profile is analytic.

Run ``python -m benchmarks.two_stage --help``. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.exact_dealing import deal_exactly, lower_bound
from benchmarks.meshes import SETTINGS
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.planning.dealing import deal, deal_greedily
from lightning_wlb.planning.planner import Planner

MESHES = {
    "7B on 16, 32K CommonCrawl": (Mesh(2, 4, 1, 2), Mesh(4, 1, 2, 2)),
    "7B on 16, 128K CommonCrawl": (Mesh(2, 4, 1, 2), Mesh(8, 1, 1, 2)),
    "13B on 32, 32K GitHub": (Mesh(4, 4, 1, 2),),
    "32B on 64, 32K CommonCrawl": (Mesh(4, 4, 1, 4),),
}
"""Meshes on which ``auto`` is fast, with a pipeline and without."""
PACKINGS = (("best_fit", False), ("hydraulis", False), ("auto", False), ("auto", True))
"""Packing, and whether its plans are chosen by the profile."""
NODES = 200
"""Most nodes of the branch-and-bound of Equation 3."""


def dealing(request: MeshRequest, mesh: Mesh) -> dict[str, Any]:
    """Each way's largest bound over the least possible, of the first step's documents."""
    work = Work.of(request.shape)
    planner = Planner(request.lengths, request.data, work, mesh)
    plan = planner.next_step()
    assert plan is not None
    costs = [work.total(piece.tokens) // mesh.pipeline for piece in plan.pieces]
    costs.sort(reverse=True)
    replicas, stages = mesh.data, mesh.pipeline
    least = max(-(-sum(costs) // replicas), stages * costs[0])

    def by_work() -> list[list[int]]:
        homes = deal(costs, [0] * replicas)
        return [[i for i, home in enumerate(homes) if home == r] for r in range(replicas)]

    alike, depths = [[cost] * replicas for cost in costs], [stages] * replicas
    result: dict[str, Any] = {"documents": len(costs), "replicas": replicas, "stages": stages}
    proven = False

    def exactly() -> list[list[int]]:
        nonlocal proven
        dealt, proven = deal_exactly(alike, depths, NODES)
        return dealt

    ways: dict[str, Callable[[], list[list[int]]]] = {
        "equation_3": exactly,
        "algorithm_1": lambda: deal_greedily(alike, depths),
        "by_work": by_work,
    }
    for name, way in ways.items():
        begin = time.perf_counter()
        dealt = way()
        # The solver is a process of its own, so that its time is wall time.
        seconds = time.perf_counter() - begin
        bound = max(lower_bound(alike, own, 0, stages) for own in dealt)
        result[name] = {"over_least": round(bound / least, 4), "seconds": round(seconds, 3)}
    result["proven"] = proven
    return result


def steps(request: MeshRequest, mesh: Mesh) -> dict[str, Any]:
    """Predicted step and planning time of each packing."""
    result = {}
    for packing, by_profile in PACKINGS:
        asked = replace(request, data=replace(request.data, packing=packing, cap=None))
        begin = time.perf_counter()
        made = evaluate(asked, mesh, by_profile=by_profile)
        seconds = time.perf_counter() - begin
        result[packing + (" by profile" if by_profile else "")] = {
            "step_ms": round(made.row.step_ms, 1),
            "fits": made.fits,
            "recomputed": round(made.row.recomputed, 3),
            "seconds": round(seconds / request.steps, 3),
        }
    return result


def main(argv: list[str] | None = None) -> None:
    arguments = report.settings_parser("two_stage", __doc__, MESHES, steps=3).parse_args(argv)
    profile = Profile.load(arguments.profile)
    rows: dict[str, Any] = {}
    for name in arguments.settings:
        request = SETTINGS[name].request("auto", profile, arguments.steps)
        for mesh in MESHES[name]:
            rows[f"{name}: {name_of(mesh)}"] = {
                "dealing": dealing(request, mesh),
                "steps": steps(request, mesh),
            }
    show(rows)
    facts = {"benchmark": "two_stage", "steps": arguments.steps, "provenance": profile.provenance}
    report.finish({**facts, "rows": rows}, arguments.output)


def show(rows: dict[str, Any]) -> None:
    """Both tables."""
    console = Console(width=160)
    ways: Sequence[str] = ("equation_3", "algorithm_1", "by_work")
    console.print(
        report.table(
            "Largest bound over the least possible; seconds",
            ("setting: mesh", "documents", "replicas", *ways, "proven"),
            [
                [
                    name,
                    str(row["dealing"]["documents"]),
                    str(row["dealing"]["replicas"]),
                    *("{over_least:.3f}; {seconds:.2f}".format(**row["dealing"][w]) for w in ways),
                    str(row["dealing"]["proven"]),
                ]
                for name, row in rows.items()
            ],
        )
    )
    names = [packing + (" by profile" if profile else "") for packing, profile in PACKINGS]
    console.print(
        report.table(
            "ms per step; seconds to plan and predict it",
            ("setting: mesh", *names),
            [
                [name, *("{step_ms:.0f}; {seconds:.2f}".format(**row["steps"][n]) for n in names)]
                for name, row in rows.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
