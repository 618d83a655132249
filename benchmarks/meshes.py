"""How good the chosen mesh is: every legal mesh of powers of two simulated, against the search.

Eight settings, written down before the first run (:data:`SETTINGS`). Of each, documents, global
batches and device profile (analytic) are fixed, and the mesh is free. *Exhaustive* means that every
data × pipeline × context × tensor mesh whose sizes are powers of two (data: what is left), with
1, 2 and 4 stages per pipeline rank, is planned by profile and simulated, with best-fit packing and
with ``auto``. *Search* is
:func:`lightning_wlb.mesh_search.search.choose_mesh`, which simulates few of them. *Regret* is what
the mesh that it chose takes over the best mesh of the exhaustive simulation, in percent.
*Proposal*, kept but no longer made, was the best mesh of Hydraulis' dynamic programme (its §7).

A step's time counts what of the gathering of parameters and of the reduction of gradients is not
hidden behind actions; it is also given with all of that (``unhidden_ms``) and with none.

The result is written after every mesh, and meshes that are in the file are not simulated again.

Run ``python -m benchmarks.meshes --help``. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.workloads import CORPORA, SHAPES, Corpus, K
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh
from lightning_wlb.planning import DataSettings
from lightning_wlb.prediction.predictor import Predictor

PACKINGS = ("best_fit", "auto")
VIRTUAL_STAGES = (1, 2, 4)
SEED = 1
"""The seed of the documents."""

MODELS = {
    **SHAPES,
    "32B": ModelShape(6656, 60, 64, 64, 104, 17_920, 32_000),
    "llama3-8B": ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256),
}
CHATS = Corpus(median=500, sigma=1.0, tail=0.001, scale=100_000, shape=2.0)
"""Short documents, of which one in a thousand fills the window."""


@dataclass(frozen=True)
class Setting:
    """A model, a cluster and documents.

    Args:
        model: a name in :data:`MODELS`.
        devices: of the cluster, in nodes as large as the profile says.
        window: context window, tokens.
        tokens: of a global batch, about.
        corpus: where the document lengths come from.
    """

    model: str
    devices: int
    window: int
    tokens: int
    corpus: Corpus

    def request(self, packing: str, profile: Profile, steps: int) -> MeshRequest:
        """What the search is asked."""
        count = max(round(self.tokens / self.window), 1)
        mean = float(self.corpus.lengths(100_000, self.window, 0).mean())
        documents = int(1.5 * (steps + 2) * count * self.window / mean) + 50
        return MeshRequest(
            lengths=self.corpus.lengths(documents, self.window, SEED),
            shape=MODELS[self.model],
            data=DataSettings(self.window, count, packing=packing, shuffle=False),
            profile=profile,
            devices=self.devices,
            devices_per_node=profile.devices_per_node,
            steps=steps,
        )

    def meshes(self, per_node: int) -> Iterator[Mesh]:
        """All of powers of two; those that the model cannot run on among them."""
        for tensor in powers(min(per_node, self.devices)):
            for pipeline in powers(self.devices // tensor):
                for context in powers(self.devices // tensor // pipeline):
                    data, left = divmod(self.devices, tensor * pipeline * context)
                    if left:
                        continue
                    for virtual in VIRTUAL_STAGES[: None if pipeline > 1 else 1]:
                        if pipeline * virtual <= MODELS[self.model].layers:
                            yield Mesh(data, pipeline, context, tensor, virtual)


COMMON_CRAWL, GITHUB, WIKIPEDIA = (
    CORPORA[name] for name in ("common_crawl", "github", "wikipedia")
)
SETTINGS = {
    "7B on 16, 32K CommonCrawl": Setting("7B", 16, 32 * K, 200_000, COMMON_CRAWL),
    "7B on 16, 128K CommonCrawl": Setting("7B", 16, 128 * K, 256_000, COMMON_CRAWL),
    "7B on 8, 32K chats": Setting("7B", 8, 32 * K, 200_000, CHATS),
    "llama3-8B on 24, 64K Wikipedia": Setting("llama3-8B", 24, 64 * K, 400_000, WIKIPEDIA),
    "13B on 32, 32K GitHub": Setting("13B", 32, 32 * K, 200_000, GITHUB),
    "32B on 64, 32K CommonCrawl": Setting("32B", 64, 32 * K, 200_000, COMMON_CRAWL),
    "32B on 64, 128K GitHub": Setting("32B", 64, 128 * K, 512_000, GITHUB),
    "70B on 256, 64K CommonCrawl": Setting("70B", 256, 64 * K, 2_000_000, COMMON_CRAWL),
}


def powers(most: int) -> Iterator[int]:
    """Powers of two up to ``most``."""
    size = 1
    while size <= most:
        yield size
        size *= 2


class Row(TypedDict):
    """A simulated mesh; ``step_ms`` is 0 where the model cannot be split so.

    ``compute_ms`` is the step without gathering, reducing and the optimizer, ``unhidden_ms`` with
    all of them before and after it, ``recomputed`` the share of tokens with activation
    checkpointing, ``cpu`` seconds of a core.
    """

    step_ms: float
    compute_ms: float
    unhidden_ms: float
    recomputed: float
    gigabytes: float
    fits: bool
    cpu: float


def simulated(request: MeshRequest, mesh: Mesh) -> Row:
    """One mesh, planned by profile."""
    begin = time.process_time()
    try:
        made = evaluate(request, mesh)
    except ValueError:
        return Row(step_ms=0, compute_ms=0, unhidden_ms=0, recomputed=0, gigabytes=0, fits=False,
            cpu=0)  # fmt: skip
    runs = [step.simulations for step in made.steps]
    compute = sum(each[0].compute_ns - min(one.begin_ns for one in each) for each in runs)
    compute_ms = compute / len(runs) / 1e6
    return Row(
        step_ms=round(made.row.step_ms, 2),
        compute_ms=round(compute_ms, 2),
        unhidden_ms=round(compute_ms + links_ns(request.predictor(mesh)) / 1e6, 2),
        recomputed=round(made.row.recomputed, 3),
        gigabytes=round(made.row.peak_bytes / 1e9, 1),
        fits=made.fits,
        cpu=round(time.process_time() - begin, 3),
    )


def links_ns(predictor: Predictor) -> int:
    """Parameters gathered, gradients reduced and applied, of the slowest pipeline rank."""
    traffic = predictor.traffic
    both = [gather + reduce for gather, reduce in zip(traffic.gather, traffic.reduce, strict=True)]
    return max(sum(both[rank :: traffic.ranks]) for rank in range(traffic.ranks)) + traffic.optimise


def searched(request: MeshRequest) -> dict[str, Any]:
    """What the search chooses, and how long it takes."""
    begin = time.process_time()
    choice = choose_mesh(request)
    row = choice.best
    return {
        "mesh": name_of(row.mesh),
        "step_ms": round(row.step_ms, 2),
        "recomputed": round(row.recomputed, 3),
        "bound_by": row.bound_by,
        "simulated": len(choice.rows),
        "cpu": round(time.process_time() - begin, 2),
    }


def run(name: str, request: MeshRequest, rows: dict[str, Row], save: Callable[[], None]) -> None:
    """Simulate what is not among the rows; ``save`` is called after every mesh.

    Raises:
        ValueError: no mesh fits.
    """
    packing = request.data.packing_choice.method
    meshes = {
        name_of(mesh): mesh for mesh in SETTINGS[name].meshes(request.profile.devices_per_node)
    }
    for key in track(meshes, f"{name}, {packing}", console=Console(stderr=True)):
        if key not in rows:
            rows[key] = simulated(request, meshes[key])
            save()


def summary(part: Mapping[str, Any]) -> dict[str, Any]:
    """Best, median and worst of the meshes that fit, and how far each way is from the best."""
    rows: dict[str, Row] = part["meshes"]
    fit = {mesh: row for mesh, row in rows.items() if row["fits"]}
    best = min(fit, key=lambda mesh: fit[mesh]["step_ms"])
    times = [row["step_ms"] for row in fit.values()]
    found = fit[best]
    return {
        "meshes": len(fit),
        "best": best,
        "best_ms": found["step_ms"],
        "best_compute_ms": found["compute_ms"],
        "best_unhidden_ms": found["unhidden_ms"],
        "least_unhidden_ms": min(row["unhidden_ms"] for row in fit.values()),
        "median_ms": round(median(times), 2),
        "worst_ms": max(times),
        "cpu": round(sum(row["cpu"] for row in rows.values()), 1),
        "regret_percent": {
            way: round(100 * (part[way]["step_ms"] / found["step_ms"] - 1), 2)
            for way in ("search", "proposal")
            if way in part
        },
    }


HEADINGS = ("setting", "packing", "meshes", "best mesh", "best", "median", "worst", "chosen",
    "regret %", "s all", "s search")  # fmt: skip


def cells(settings: Mapping[str, Any]) -> list[list[str]]:
    """A line of the table for every setting and packing; times in ms."""
    lines = []
    for name, packings in settings.items():
        for packing, part in packings.items():
            if "summary" in part:
                all_, search = part["summary"], part["search"]
                lines.append([
                    name, packing, str(all_["meshes"]), all_["best"],
                    *(f"{all_[each]:.0f}" for each in ("best_ms", "median_ms", "worst_ms")),
                    f"{search['mesh']}: {search['step_ms']:.0f}",
                    f"{all_['regret_percent']['search']:.1f}",
                    *(f"{part[way]['cpu']:.0f}" for way in ("summary", "search")),
                ])  # fmt: skip
    return lines


def picture(settings: Mapping[str, Any], path: Path) -> None:
    """Step time over meshes, in ascending order, a panel for each setting."""
    made = {name: packings for name, packings in settings.items() if packings}
    rows = -(-len(made) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3 * rows), squeeze=False)
    for panel in axes.flat[len(made) :]:
        panel.axis("off")
    for panel, (name, packings) in zip(axes.flat, made.items(), strict=False):
        for packing, part in packings.items():
            times = sorted(row["step_ms"] for row in part["meshes"].values() if row["fits"])
            panel.plot(range(1, len(times) + 1), times, ".-", label=packing)
            if "search" in part:
                chosen = part["search"]["step_ms"]
                place = 1 + sum(each < chosen for each in times)
                panel.plot([place], [chosen], "k*", markersize=10)
        panel.set(title=name, yscale="log", ylabel="ms per step", xlabel="meshes, fastest first")
        panel.legend()
    figure.suptitle("Simulated steps on every mesh; a star is what the search chose")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = report.settings_parser("meshes", __doc__, SETTINGS, steps=3)
    parser.add_argument("--packings", nargs="+", default=list(PACKINGS), choices=PACKINGS)
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile)
    result, save = report.gone_on_with("meshes", profile, arguments)
    result.setdefault("settings", {})
    for name in arguments.settings:
        of_setting = result["settings"].setdefault(name, {})
        for packing in arguments.packings:
            request = SETTINGS[name].request(packing, profile, arguments.steps)
            part = of_setting.setdefault(packing, {"meshes": {}})
            run(name, request, part["meshes"], save)
            part["search"] = searched(request)
            part["summary"] = summary(part)
            save()
    console = Console(width=200)
    console.print(report.table("Meshes, simulated", HEADINGS, cells(result["settings"])))
    if arguments.output:
        picture(result["settings"], arguments.output.with_suffix(".png"))
    report.finish(result)


if __name__ == "__main__":
    main()
