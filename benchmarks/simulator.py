"""Predicted step times against real runs on CPU ranks: pipeline 2, context 2 and data 2.

A device profile is taken first, on as many processes as the runs have ranks, so that it feels the
same neighbours. Then a small decoder trains on the standard library under a Trainer, on each mesh
with several windows and packings, and every step is judged:

* *replayed*: the schedule replayed with every action's own measured CPU time, against the same
  schedule with predicted times, communication left out of both. Valid on any number of cores.
* *wall clock*: the whole step as the Trainer saw it, reduction and optimizer included, against
  the whole prediction. Only meaningful with a core for each rank and nothing else running.

The profile knows none of the judged plans. The first steps of each run warm up and are left out.

Run ``python -m benchmarks.simulator --help``. Prints a table and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.paper_speedups import without_communication
from lightning_wlb.cost.communication import Mesh
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning.predict import Predictor
from lightning_wlb.profiling import measure, measure_link
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.registry import make_programs
from lightning_wlb.schedule.simulate import simulate_replicas
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks

RANKS = 2
WARM_UP = 2
CONFIG = TransformerConfig.preset("tiny")
MESHES = {
    "pipeline 2": Mesh(pipeline=2),
    "context 2": Mesh(context=2),
    "data 2": Mesh(data=2),
}


@dataclass(frozen=True)
class Setting:
    """One run: window and micro-batches of a step, packing and sharding."""

    window: int
    micro_batches: int
    packing: str
    sharding: str


SETTINGS = (
    Setting(4096, 4, "original", "per_sequence"),
    Setting(2048, 6, "wlb", "per_document_contiguous"),
    Setting(8192, 3, "wlb", "per_document_contiguous"),
)


class Recorder(L.Callback):
    """Keeps plan, timings and wall time of every step of this rank."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.begin = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Time every action from here on."""
        trainer.strategy.executor.measure()

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Start the step's clock."""
        self.begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        """Keep the step."""
        executor = trainer.strategy.executor
        self.steps.append(
            {
                "plan": batch.plan.to_json(),
                "wall": time.perf_counter() - self.begin,
                "timings": [(str(each.action), each.compute) for each in executor.timings()],
                "stages": [(part.start, part.stop) for part in executor.pipeline.stages],
            }
        )


def profile_rank(rank: int, link: tuple[float, float]) -> str:
    """The profile as one rank sees it while the others do the same."""
    profile = measure(
        CONFIG, name="in-run", device=torch.device("cpu"), dtype=torch.float32, links=False
    )
    node = replace(profile.links["node"], latency_ns=link[0], bytes_per_second=link[1])
    return replace(profile, links={"node": node}, devices_per_node=RANKS).to_json()


def train_rank(rank: int, sizes: tuple[int, int, int, int], steps: int) -> list[list[Any]]:
    """The recorded steps of every setting on one mesh."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    data, pipeline, context, tensor = sizes
    runs = []
    for setting in SETTINGS:
        recorder = Recorder()
        trainer = L.Trainer(
            strategy=WLBStrategy(data, pipeline, context, tensor),
            accelerator="cpu",
            devices=RANKS,
            max_steps=steps + WARM_UP,
            max_epochs=-1,
            callbacks=[recorder],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # The Trainer shares the machine's cores out; the profile was taken on one thread.
        torch.set_num_threads(1)
        trainer.fit(
            LanguageModule(CONFIG),
            WLBDataModule(
                context_window=setting.window,
                micro_batches=setting.micro_batches,
                packing=setting.packing,
                sharding=setting.sharding,
                num_workers=0,  # the ranks are daemons, which may not start processes
            ),
        )
        runs.append(recorder.steps)
    return runs


def judge(mesh: Mesh, ranks: list[list[dict[str, Any]]], profile: Profile) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each step of one run; ``ranks`` in order of rank."""
    judged = []
    silent = without_communication(profile)
    for step in range(WARM_UP, len(ranks[0])):
        plan = StepPlan.from_json(ranks[0][step]["plan"])
        stages = tuple(range(*part) for part in ranks[0][step]["stages"])
        compute = Predictor(LatencyModel(silent, CONFIG.shape, mesh), stages).predict(plan)
        whole = Predictor(LatencyModel(profile, CONFIG.shape, mesh), stages).predict(plan)
        measured = replayed_ns(mesh, plan, [rank[step]["timings"] for rank in ranks])
        judged.append(
            {
                "predicted": compute.simulations[0].compute_ns / 1e9,
                "replayed": measured / 1e9,
                "predicted_wall": whole.total_ns / 1e9,
                "wall": max(rank[step]["wall"] for rank in ranks),
            }
        )
    return judged


def replayed_ns(mesh: Mesh, plan: StepPlan, timings: list[list[tuple[str, float]]]) -> int:
    """The schedule with each action's CPU time, the slowest context rank's; no communication."""
    measured: dict[tuple[int, Action], int] = {}
    for rank, of_rank in enumerate(timings):
        replica = rank // (mesh.pipeline * mesh.context * mesh.tensor)
        for text, seconds in of_rank:
            key = replica, Action.parse(text)
            measured[key] = max(measured.get(key, 0), round(seconds * 1e9))
    programs = [
        make_programs("1f1b", mesh.pipeline, len(replica.forward)) for replica in plan.replicas
    ]
    simulations = simulate_replicas(programs, lambda replica, action: measured[replica, action])
    return simulations[0].compute_ns


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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=8, help="judged steps per run (default 8)")
    parser.add_argument("--profile", help="a file instead of a profile taken in this run")
    arguments = parser.parse_args(argv)
    console = Console(width=140)
    if arguments.profile:
        profile = Profile.load(arguments.profile)
    else:
        link = measure_link(torch.device("cpu"))
        texts = run_ranks(
            profile_rank, RANKS, (link.latency_ns, link.bytes_per_second),
            timeout=900, process_group=False,
        )  # fmt: skip
        profile = Profile.from_json(texts[0])
    results: dict[str, list[dict[str, Any]]] = {}
    for name, mesh in MESHES.items():
        sizes = (mesh.data, mesh.pipeline, mesh.context, mesh.tensor)
        ranks = run_ranks(
            train_rank, RANKS, sizes, arguments.steps, timeout=900, process_group=False
        )
        results[name] = [
            judged
            for setting in range(len(SETTINGS))
            for judged in judge(mesh, [rank[setting] for rank in ranks], profile)
        ]
    everything = [judged for each in results.values() for judged in each]
    table = Table(
        title="Predicted step times against real runs",
        caption=f"{profile.provenance}. Held-out micro-batches: median error"
        f" {profile.errors.get('median', float('nan')):.1%}.",
    )
    for heading in ("", "plans", "span", "median error", "p90", "bias", "rank correlation"):
        table.add_column(heading, justify="right" if heading else "left")
    report: dict[str, Any] = {}
    for kind, predicted, measured in (
        ("replayed CPU times", "predicted", "replayed"),
        ("wall clock", "predicted_wall", "wall"),
    ):
        for name, judged in {**results, "all": everything}.items():
            row = summary(judged, predicted, measured)
            report.setdefault(kind, {})[name] = row
            table.add_row(
                f"{kind}, {name}",
                f"{row['plans']}",
                f"{row['span']:.2f}×",
                f"{row['median_error']:.1%}",
                f"{row['p90_error']:.1%}",
                f"{row['bias']:+.1%}",
                f"{row['rank_correlation']:.3f}",
            )
    console.print(table)
    print(
        json.dumps(
            {
                "benchmark": "simulator",
                "cores": os.cpu_count(),
                "ranks": RANKS,
                "profile": {"device": profile.device, "errors": dict(profile.errors)},
                "results": report,
                "steps": {name: judged for name, judged in results.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
