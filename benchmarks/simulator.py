"""Predicted steps against real runs on CPU ranks: pipeline 2 (whole and sliced), context, data 2.

A device profile is taken first, on as many processes as the runs have ranks, so that it feels the
same neighbours. Then a small decoder trains on the standard library under a Trainer, on each mesh
with several windows and packings, and every step is judged:

* *replayed*: the schedule replayed with every action's own measured CPU time, against the same
  schedule with predicted times, communication left out of both. Valid on any number of cores.
* *wall clock*: the whole step as the Trainer saw it, reduction and optimizer included, against
  the whole prediction. Only meaningful with a core for each rank and nothing else running.
* both again, *own speed*: each prediction scaled by how much slower than predicted the machine was
  in the other steps of the run. A shared machine is up to 1.5 times slower in one run than in the
  next; what is left is the error of the simulator and of the cost model's proportions.
* *peak of activations*: the simulator's account against the executor's count, for every step and
  rank of further runs on the pipelines.

The profile knows none of the judged plans. The first steps of each run warm up and are left out.

Run ``python -m benchmarks.simulator --help``. Prints a table and as its last line one JSON object.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.measured import RankStep, replayed, train
from benchmarks.paper_speedups import without_communication
from benchmarks.ranks import run_ranks
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.profiling.device_profile import measure
from lightning_wlb.profiling.link_speed import measure_link

RANKS = 2
WARM_UP = 2
CONFIG = TransformerConfig.preset("tiny")


@dataclass(frozen=True)
class Setting:
    """One run: window and micro-batches of a step, packing and sharding."""

    window: int
    micro_batches: int
    packing: str | dict[str, Any]
    sharding: str = "per_document_contiguous"


WHOLE = (
    Setting(4096, 4, "original", "per_sequence"),
    Setting(2048, 6, "wlb"),
    Setting(8192, 3, "wlb"),
)
SLICED = (
    *(Setting(4096, 4, {"method": "slim", "micro_packs": multiple}) for multiple in (1, 2, 4)),
    Setting(4096, 4, "auto"),
)
RUNS = {
    "pipeline 2": (Mesh(pipeline=2), WHOLE),
    "context 2": (Mesh(context=2), WHOLE),
    "data 2": (Mesh(data=2), WHOLE),
    "pipeline 2, slices": (Mesh(pipeline=2), SLICED),
}
"""The mesh and the runs on it."""


def profile_rank(rank: int, link: tuple[float, float]) -> str:
    """The profile as one rank sees it while the others do the same."""
    profile = measure(
        CONFIG, name="in-run", device=torch.device("cpu"), dtype=torch.float32, links=False
    )
    node = replace(profile.links["node"], latency_ns=link[0], bytes_per_second=link[1])
    return replace(profile, links={"node": node}, devices_per_node=RANKS).to_json()


def train_rank(rank: int, name: str, steps: int, counted: bool = False) -> list[list[RankStep]]:
    """The recorded steps of every setting of a mesh."""
    mesh, settings = RUNS[name]
    return [
        train(
            CONFIG,
            mesh,
            WLBDataModule(
                "stdlib",
                context_window=setting.window,
                micro_batches=setting.micro_batches,
                packing=setting.packing,
                sharding=setting.sharding,
                profile="none",
                num_workers=0,  # ranks are daemons, which have no children
            ),
            counted=counted,
            max_steps=steps,
            max_epochs=-1,
        )
        for setting in settings
    ]


def judge(mesh: Mesh, ranks: list[list[RankStep]], profile: Profile) -> list[dict[str, float]]:
    """Predicted and measured seconds of each step of one run; ``ranks`` in order of rank."""
    judged = []
    silent = without_communication(profile)
    for of_ranks in list(zip(*ranks, strict=True))[WARM_UP:]:
        plan = StepPlan.from_json(of_ranks[0].plan)
        stages = tuple(range(*part) for part in of_ranks[0].stages)
        compute = Predictor(LatencyModel(silent, CONFIG.shape, mesh), stages).predict(plan)
        whole = Predictor(LatencyModel(profile, CONFIG.shape, mesh), stages).predict(plan)
        ran = replayed(mesh, plan, [rank.compute for rank in of_ranks])
        judged.append(
            {
                "predicted": compute.simulations[0].compute_ns / 1e9,
                "replayed": ran[0].compute_ns / 1e9,
                "predicted_wall": whole.total_ns / 1e9,
                "wall": max(rank.wall for rank in of_ranks),
            }
        )
    return at_own_speed(judged)


def at_own_speed(judged: list[dict[str, float]]) -> list[dict[str, float]]:
    """The steps of one run, with what is predicted if the machine is as fast as in the others.

    A step's factor is the median of measured over predicted of the run's *other* steps.
    """
    made = [dict(each) for each in judged]
    for predicted, measured in (("predicted", "replayed"), ("predicted_wall", "wall")):
        slower = [each[measured] / each[predicted] for each in judged]
        for at, each in enumerate(made):
            others = slower[:at] + slower[at + 1 :] or [1.0]
            each[f"{predicted}_at_own_speed"] = each[predicted] * float(np.median(others))
    return made


def judge_memory(
    mesh: Mesh, ranks: list[list[RankStep]], profile: Profile
) -> list[dict[str, float]]:
    """Predicted and counted peak of activations of every step and rank of one run."""
    judged = []
    for of_ranks in zip(*ranks, strict=True):
        plan = StepPlan.from_json(of_ranks[0].plan)
        stages = tuple(range(*part) for part in of_ranks[0].stages)
        predictor = Predictor(LatencyModel(profile, CONFIG.shape, mesh), stages)
        (simulation,) = predictor.simulate(plan.replicas).simulations
        for rank, constant, peak in zip(
            of_ranks, simulation.constant_bytes, simulation.peak_bytes, strict=True
        ):
            judged.append({"predicted": peak - constant, "counted": max(rank.held)})
    return judged


def summary(judged: list[dict[str, Any]], predicted: str, measured: str) -> dict[str, float]:
    """Errors, rank correlation and span of the predicted times."""
    ours = np.array([each[predicted] for each in judged])
    real = np.array([each[measured] for each in judged])
    errors = np.abs(ours / real - 1)
    return {
        "plans": len(judged),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.percentile(errors, 90)),
        "bias": float(np.median(ours / real) - 1),
        "rank_correlation": float(np.corrcoef(_ranks(ours), _ranks(real))[0, 1]),
        "span": float(ours.max() / ours.min()),
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def ran(name: str, steps: int, counted: bool = False) -> list[list[list[RankStep]]]:
    """The steps of every setting on a mesh: by setting, then rank."""
    of_ranks = run_ranks(train_rank, RANKS, name, steps, counted, timeout=900, process_group=False)
    return [list(of_setting) for of_setting in zip(*of_ranks, strict=True)]


def measured_profile() -> Profile:
    """What every rank sees while the others measure too: the first rank's."""
    link = measure_link(torch.device("cpu"))
    texts = run_ranks(
        profile_rank, RANKS, (link.latency_ns, link.bytes_per_second),
        timeout=900, process_group=False,
    )  # fmt: skip
    return Profile.from_json(texts[0])


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("simulator", __doc__)
    parser.add_argument("--steps", type=int, default=8, help="judged steps per run (default 8)")
    parser.add_argument("--profile", help="a file instead of a profile taken in this run")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / "simulator.json",
        help="where to write the JSON object too",
    )
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile) if arguments.profile else measured_profile()
    results = {
        name: [
            judged
            for ranks in ran(name, arguments.steps + WARM_UP)
            for judged in judge(mesh, ranks, profile)
        ]
        for name, (mesh, _) in RUNS.items()
    }
    memory = {
        name: [
            judged for ranks in ran(name, 3, True) for judged in judge_memory(mesh, ranks, profile)
        ]
        for name, (mesh, _) in RUNS.items()
        if mesh.pipeline > 1
    }
    everything = {**results, "all": [judged for each in results.values() for judged in each]}
    summaries = {
        kind: {name: summary(judged, predicted, measured) for name, judged in compared.items()}
        for kind, compared, predicted, measured in (
            ("replayed CPU times", everything, "predicted", "replayed"),
            ("wall clock", everything, "predicted_wall", "wall"),
            ("replayed, own speed", results, "predicted_at_own_speed", "replayed"),
            ("wall clock, own speed", results, "predicted_wall_at_own_speed", "wall"),
            ("peak of activations", memory, "predicted", "counted"),
        )
    }
    cells = [
        [
            f"{kind}, {name}",
            f"{row['plans']}",
            f"{row['span']:.2f}×",
            f"{row['median_error']:.1%}",
            f"{row['p90_error']:.1%}",
            f"{row['bias']:+.1%}",
            f"{row['rank_correlation']:.3f}",
        ]
        for kind, of_kind in summaries.items()
        for name, row in of_kind.items()
    ]
    headings = ("", "plans", "span", "median error", "p90", "bias", "rank correlation")
    caption = (
        f"{profile.provenance}. Held-out micro-batches: median error"
        f" {profile.errors.get('median', float('nan')):.1%}."
    )
    title = "Predicted step times against real runs"
    Console(width=140).print(report.table(title, headings, cells, caption))
    made = {
        "benchmark": "simulator",
        "cores": os.cpu_count(),
        "ranks": RANKS,
        "profile": {"device": profile.device, "errors": dict(profile.errors)},
        "results": summaries,
        "steps": results,
        "activations": memory,
    }
    report.finish(made, arguments.output)


if __name__ == "__main__":
    main()
