"""When steps on pipelines of their own pay: against the best static mesh.

The first steps of a run of each of :data:`SETTINGS` are cut into three parts of equally many.
All is simulated by an analytic profile, packed by ``auto``, with one stage on each pipeline rank.

* *Mesh*: the second part is planned on every legal mesh; of more than :data:`MANY`, on those that
  the closed form of the search finds fastest. The best of them is the static mesh, chosen in
  hindsight, and what follows is against it.
* *Each step its mesh*: if each of these steps could be run on the mesh that is fastest for it, and
  nothing had to travel. More than that no choice among pipelines that are all alike can gain;
  mixtures of pipelines might.
* *Promised*: what ``dynamic="auto"`` says
  (:func:`lightning_wlb.heterogeneous.planning.pool_search.choose_pool`): the
  pool is chosen by the first part and judged by the second.
* *Later*: what the same pool gains in the third part, which it knows nothing of.

The file is written after each setting, and settings that are in it are not simulated again.

Run ``python -m benchmarks.dynamic_gain --help``. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.meshes import CHATS, COMMON_CRAWL, GITHUB, Setting
from benchmarks.workloads import Corpus, K
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import choose_pool, described
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.closed_form import ClosedForm
from lightning_wlb.mesh_search.evaluate import name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import legal_meshes
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning import Planner
from lightning_wlb.planning.plan_scoring import PlanScore, ProfileScorer
from lightning_wlb.planning.step_chooser import fastest

MANY = 20
"""Meshes that are planned at most."""

DOCUMENTS = 12
"""Parts of a run for which there are documents."""

RARE = Corpus(median=500, sigma=1.0, tail=0.001, scale=60_000, shape=1.0)
"""Short documents, of which one in a thousand is long, and some of these fill 128K tokens."""

SETTINGS = {
    "7B on 8, 128K chats": Setting("7B", 8, 128 * K, 128 * K, CHATS),
    "13B on 8, 32K chats": Setting("13B", 8, 32 * K, 100_000, CHATS),
    "13B on 16, 128K chats": Setting("13B", 16, 128 * K, 128 * K, CHATS),
    "7B on 8, 128K rare": Setting("7B", 8, 128 * K, 128 * K, RARE),
    "7B on 8, 32K chats": Setting("7B", 8, 32 * K, 200_000, CHATS),
    "7B on 16, 32K CommonCrawl": Setting("7B", 16, 32 * K, 200_000, COMMON_CRAWL),
    "13B on 8, 128K rare": Setting("13B", 8, 128 * K, 128 * K, RARE),
    "13B on 32, 32K GitHub": Setting("13B", 32, 32 * K, 200_000, GITHUB),
    "32B on 64, 128K chats": Setting("32B", 64, 128 * K, 512_000, CHATS),
}

HEADINGS = ("setting", "mesh", "ms", "each step its mesh %", "promised %", "later %", "strategies",
    "s pool")  # fmt: skip


class Sample:
    """The first steps of a run on a mesh, in three parts.

    Args:
        request: what is searched for.
        mesh: that the steps are planned for.
        steps: of each part.
    """

    def __init__(self, request: MeshRequest, mesh: Mesh, steps: int) -> None:
        self.request, self.steps = request, steps
        self.base = request.predictor(mesh)
        self.scorer = ProfileScorer(self.base)
        self.planner = Planner(
            request.lengths,
            request.data,
            Work.of(request.shape),
            mesh,
            kernel_cost=self.base.latency.segment_cost,
            scorer=self.scorer,
        )

    def plans(self, part: int) -> list[StepPlan]:
        """Those of a part; parts are asked for in ascending order."""
        plans, first = [], part * self.steps
        while len(plans) < self.steps:
            release = self.planner.release()
            if release is not None and release.step >= first:
                plans.append(self.planner.place(release))
        return plans

    def verdicts(self, plans: Sequence[StepPlan]) -> list[PlanScore]:
        """Time and memory of steps on the mesh."""
        return [self.scorer(plan.replicas) for plan in plans]

    def gain(self, pool: Pool, plans: Sequence[StepPlan]) -> float:
        """Time of steps on the mesh over that where each may leave it."""
        on_mesh = chosen = 0
        for plan, verdict in zip(plans, self.verdicts(plans), strict=True):
            planned = pool.arranged(plan.pieces, self.planner.packer)
            elected = fastest(planned, verdict, self.scorer.limit)
            on_mesh += verdict.time
            chosen += elected.time_ns if elected else verdict.time
        return on_mesh / chosen


def meshes(request: MeshRequest) -> list[Mesh]:
    """The legal ones, or the best of them by the closed form."""
    form = ClosedForm(request)
    legal = legal_meshes(request)
    fit = {mesh: each for mesh in legal if (each := form.step_ns(mesh))}
    return sorted(fit, key=fit.__getitem__)[:MANY]


def row(setting: Setting, profile: Profile, steps: int) -> dict[str, Any]:
    """The figures of a setting.

    Raises:
        ValueError: no mesh fits.
    """
    # Documents enough that no step comes twice among those that a pool is chosen by.
    request = setting.request("auto", profile, DOCUMENTS * steps)
    request = replace(request, steps=3 * steps, virtual_stages=1)
    times: dict[Mesh, list[int]] = {}
    least = [0] * steps
    for mesh in meshes(request):
        sample = Sample(request, mesh, steps)
        verdicts = sample.verdicts(sample.plans(1))
        fits = [each.peak <= sample.scorer.limit for each in verdicts]
        for number, (verdict, fit) in enumerate(zip(verdicts, fits, strict=True)):
            if fit:
                least[number] = min(least[number] or verdict.time, verdict.time)
        if all(fits):
            times[mesh] = [each.time for each in verdicts]
    if not times:
        raise ValueError("no mesh fits in memory in every step. Give another setting.")
    best = min(times, key=lambda mesh: sum(times[mesh]))
    begin = time.process_time()
    choice = choose_pool(replace(request, steps=2 * steps), best)
    cpu = time.process_time() - begin
    later = 1.0
    if choice.tried:
        sample = Sample(request, best, steps)
        later = sample.gain(Pool.of(choice.tried, sample.base), sample.plans(2))
    return {
        "meshes": {name_of(mesh): sum(each) / steps / 1e6 for mesh, each in times.items()},
        "mesh": name_of(best),
        "step_ms": sum(times[best]) / steps / 1e6,
        "each_its_mesh_percent": percent(sum(times[best]) / sum(least)),
        "promised_percent": percent(choice.gain),
        "later_percent": percent(later),
        "pays": bool(choice.schemes),
        "strategies": [
            [described(strategy), count]
            for strategy, count in zip(choice.tried, choice.chosen, strict=True)
        ],
        "pool_cpu": round(cpu, 1),
    }


def percent(ratio: float) -> float:
    """A gain in percent."""
    return round(100 * (ratio - 1), 2)


def cells(rows: dict[str, Any]) -> list[list[str]]:
    """Lines of the table."""
    return [
        [
            name, of["mesh"], f"{of['step_ms']:.0f}", f"{of['each_its_mesh_percent']:.1f}",
            f"{of['promised_percent']:.1f}", f"{of['later_percent']:.1f}",
            str(len(of["strategies"])), f"{of['pool_cpu']:.0f}",
        ]
        for name, of in rows.items()
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = report.settings_parser("dynamic_gain", __doc__, SETTINGS, steps=6)
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile)
    result, save = report.gone_on_with("dynamic_gain", profile, arguments)
    rows: dict[str, Any] = result.setdefault("rows", {})
    for name in arguments.settings:
        if name not in rows:
            rows[name] = row(SETTINGS[name], profile, arguments.steps)
            save()
    console = Console(width=160)
    console.print(report.table("Steps that leave the mesh, simulated", HEADINGS, cells(rows)))
    report.finish(result)


if __name__ == "__main__":
    main()
