"""What the search for a mesh takes, and what it misses of the best mesh.

*Time*: processor time of ``lightning-wlb plan --mesh auto``, which searches for three packings, on
64 and on 1,024 devices. *Regret*: in smaller settings all steps are simulated on every legal mesh
that fits by the closed form, and the mesh that the search chooses is compared with the fastest. It
may be 1 % slower, as of meshes so close the one with least communication is taken; so it is also
compared with what that rule chooses among all meshes, and among those of which it simulates a
sample, as if it simulated all of these to the end.

Documents are those of Generator A, the packing of the regret is ``auto``. The result is written
after every setting and every mesh, and what is in the file is not made again.

Run ``python -m benchmarks.search_time --help``. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import report
from lightning_wlb.cli.main import main as lightning_wlb
from lightning_wlb.cli.main import parser
from lightning_wlb.cli.request import requests_of
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh_search.closed_form import ClosedForm
from lightning_wlb.mesh_search.evaluate import evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import CLOSE, SAMPLED_MESHES, choose_mesh, legal_meshes

K = 1024


class Asked(NamedTuple):
    """A search: preset of the model, context window, devices in nodes of 8, micro-batches."""

    model: str
    window: int
    devices: int
    micro_batches: int

    def command(self, profile: str, steps: int) -> list[str]:
        """The arguments of ``lightning-wlb``."""
        return [
            *("plan", "--lengths", "generator-a", "--model", self.model, "--mesh", "auto"),
            *("--context-window", str(self.window), "--devices", str(self.devices)),
            *("--micro-batches", str(self.micro_batches), "--devices-per-node", "8"),
            *("--profile", profile, "--steps", str(steps), "--json"),
        ]


TIMED = [
    *(Asked(model, window * K, 64, 16) for model in ("7b", "70b") for window in (32, 128)),
    *(Asked(model, 32 * K, 1024, 128) for model in ("7b", "70b")),
    *(Asked(model, 128 * K, 1024, 64) for model in ("7b", "70b")),
]
COMPARED = [
    Asked("550m", 32 * K, 8, 8), Asked("7b", 8 * K, 8, 16), Asked("7b", 32 * K, 8, 4),
    Asked("7b", 128 * K, 8, 2), Asked("7b", 64 * K, 12, 6), Asked("7b", 32 * K, 16, 8),
    Asked("7b", 128 * K, 16, 4), Asked("llama3-8b", 32 * K, 8, 4),
    Asked("llama3-8b", 32 * K, 16, 8), Asked("llama3-8b", 64 * K, 24, 6),
    Asked("30b", 32 * K, 16, 4), Asked("30b", 128 * K, 16, 2),
]  # fmt: skip


def name(asked: Asked) -> str:
    """How a setting is called."""
    return f"{asked.model} on {asked.devices}, {asked.window // K}K, N {asked.micro_batches}"


TIMES = {name(asked): asked for asked in TIMED}
REGRETS = {name(asked): asked for asked in COMPARED}


def timed(asked: Asked, profile: str, steps: int) -> dict[str, Any]:
    """Processor time of the command, and what it finds."""
    out, begin = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out):
        code = lightning_wlb(asked.command(profile, steps))
    if code != 0:
        raise RuntimeError(f"{name(asked)}: the command has failed")
    found = json.loads(out.getvalue().splitlines()[-1])
    bests = {"auto": found["rows"][0], **{each: found[each] for each in ("original", "best_fit")}}
    return {
        "cpu": round(time.process_time() - begin, 1),
        "rows": len(found["rows"]),
        **{way: best and [best["mesh"], round(best["step_ms"], 1)] for way, best in bests.items()},
    }


def request_of(asked: Asked, profile: str, steps: int) -> MeshRequest:
    """What the command searches for with its own packing."""
    return requests_of(parser("plan").parse_args(asked.command(profile, steps)))[-1]


def regret(request: MeshRequest, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Put every mesh into ``found``, in the order of the closed form, and the search's choice."""
    form, rows = ClosedForm(request), found.setdefault("meshes", {})
    estimates = {mesh: form.step_ns(mesh) for mesh in legal_meshes(request)}
    fit = [mesh for mesh, step in estimates.items() if step]
    for mesh in sorted(fit, key=lambda mesh: (estimates[mesh], *mesh.shape, mesh.virtual_stages)):
        if name_of(mesh) not in rows:
            begin = time.process_time()
            made = evaluate(request, mesh)
            rows[name_of(mesh)] = {
                "steps_ns": made.steps_ns,
                "communication_ns": round(made.row.communication_ns),
                "fits": made.fits,
                "cpu": round(time.process_time() - begin, 2),
            }
            save()
    begin = time.process_time()
    found["search"] = name_of(choose_mesh(request).best.mesh)
    found["search_cpu"] = round(time.process_time() - begin, 1)
    first = dict(list(rows.items())[:SAMPLED_MESHES])
    found["sampled"], found["every"] = chosen(first), chosen(rows)
    found["sampled_cpu"] = round(sum(row["cpu"] for row in first.values()), 1)
    best = min(row["steps_ns"] for row in rows.values() if row["fits"])
    found["slower_percent"] = {
        way: round(100 * (rows[found[way]]["steps_ns"] / best - 1), 2)
        for way in ("search", "sampled", "every")
    }
    save()


def chosen(rows: Mapping[str, Any]) -> str:
    """The mesh with least communication of those within 1 % of the fastest."""
    fit = {mesh: row for mesh, row in rows.items() if row["fits"]}
    least = min(row["steps_ns"] for row in fit.values())
    close = (mesh for mesh, row in fit.items() if row["steps_ns"] <= CLOSE * least)
    return min(close, key=lambda mesh: (fit[mesh]["communication_ns"], fit[mesh]["steps_ns"]))


def main(argv: list[str] | None = None) -> None:
    """Make what the result lacks, and print all of it."""
    made = report.settings_parser("search_time", __doc__, [*TIMES, *REGRETS], steps=3)
    arguments = made.parse_args(argv)
    result, save = report.gone_on_with("search_time", Profile.load(arguments.profile), arguments)
    times, regrets = result.setdefault("time", {}), result.setdefault("regret", {})
    given = arguments.profile, arguments.steps
    for each in arguments.settings:
        if each in TIMES and each not in times:
            times[each] = timed(TIMES[each], *given)
            save()
        if each in REGRETS and "slower_percent" not in regrets.setdefault(each, {}):
            regret(request_of(REGRETS[each], *given), regrets[each], save)
    console = Console(width=160)
    cells = [[each, f"{run['cpu']:.0f}", str(run["auto"])] for each, run in times.items()]
    console.print(report.table("Searches", ("setting", "s", "chosen, ms"), cells))
    cells = [
        [
            each, run["search"], *(f"{value:.2f}" for value in run["slower_percent"].values()),
            f"{run['search_cpu']:.0f}", f"{run['sampled_cpu']:.0f}",
        ]
        for each, run in regrets.items() if "slower_percent" in run
    ]  # fmt: skip
    headings = "setting", "chosen", "slower %", "of sampled", "of all", "s", "s, sampled"
    console.print(report.table("Over the fastest of all meshes", headings, cells))
    report.finish(result)


if __name__ == "__main__":
    main()
