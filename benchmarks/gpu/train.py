"""Part 3: a decoder of about a billion parameters trains, with ``original`` and ``auto`` in turn.

Documents of Generator A, bf16-mixed, selective recomputation, one device. Each row is some steps of
one packing by a Trainer; the packings take turns, so that what changes on the machine meets both.
The first step of a row warms up and is left out. Beside what was measured stands what the step's
plan was predicted to take, by a profile of the same layers that is measured first.

*MFU* is the model's FLOPs, what is computed again left out, over the time and the peak of the
device's data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.profile import profile_for, profile_row
from benchmarks.gpu.recording import Figures, Row, Run
from benchmarks.measured import RankStep, train
from benchmarks.workloads import documents_for, generator_a
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.predictor import Predictor

PACKINGS = ("original", "auto")
LAYERS = "trained"  # in the name of the profile's file


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Args:
        config: of the model.
        window: context window, tokens.
        micro_batches: micro-batches' worth of tokens in a step.
        steps: of a row, without the one that warms up.
        rounds: rows of each packing.
        workers: of the loader.
    """

    config: TransformerConfig
    window: int
    micro_batches: int
    steps: int
    rounds: int
    workers: int


BILLION = Setting(
    TransformerConfig(dim=2048, layers=18, heads=16, kv_heads=8, ffn_dim=6144, vocab_size=32_000),
    window=131_072,
    micro_batches=2,
    steps=5,
    rounds=2,
    workers=1,
)
SMALL = Setting(
    TransformerConfig.preset("tiny"), window=512, micro_batches=2, steps=2, rounds=1, workers=0
)


def setting_of(run: Run) -> Setting:
    """What is trained in a run of this size."""
    return SMALL if run.small else BILLION


def rows(run: Run) -> list[Row]:
    """The profile, and then the packings in turn."""
    setting = setting_of(run)
    return [
        ("profile", partial(profile_row, run, LAYERS, setting.config)),
        *(
            (f"{packing}, round {number + 1}", partial(_row, run, packing, number))
            for number in range(setting.rounds)
            for packing in PACKINGS
        ),
    ]


def summary(done: Figures) -> dict[str, Any]:
    """Medians over all steps of each packing, and of ``auto`` over ``original``, by token."""
    medians: dict[str, Any] = {}
    for packing in PACKINGS:
        steps = [
            step
            for name, row in done.items()
            if name.startswith(f"{packing}, ")
            for step in row["steps"]
        ]
        if steps:
            medians[packing] = {
                figure: median(step[figure] for step in steps)
                for figure in (*FIGURES, "seconds_per_predicted", "peak_bytes_per_predicted")
            }
            medians[packing]["max_memory_allocated"] = max(step["peak_bytes"] for step in steps)
    if len(medians) == len(PACKINGS):
        original, auto = (medians[packing]["tokens_per_second"] for packing in PACKINGS)
        medians["auto_over_original"] = auto / original
    return medians


FIGURES = ("seconds", "tokens_per_second", "mfu")


def trained(run: Run, packing: str, seed: int, steps: int, **options: Any) -> list[RankStep]:
    """Train a fresh model for so many steps.

    Args:
        run: with the device.
        packing: of the steps.
        seed: of the documents.
        steps: how many.
        options: of the Trainer.
    """
    setting = setting_of(run)
    count = documents_for(steps, setting.micro_batches, setting.window)
    tokens = np.random.default_rng(seed)
    documents = [
        tokens.integers(0, setting.config.vocab_size, length)
        for length in generator_a(count, setting.window, seed)
    ]
    data = WLBDataModule(
        InMemoryDocuments(documents, vocab_size=setting.config.vocab_size),
        context_window=setting.window,
        micro_batches=setting.micro_batches,
        packing=packing,
        profile=profile_for(run, LAYERS),
        num_workers=setting.workers,
    )
    return train(
        setting.config,
        Mesh(),
        data,
        activation_checkpointing="selective",
        accelerator="gpu" if run.device.type == "cuda" else "cpu",
        precision="bf16-mixed" if run.device.type == "cuda" else "32-true",
        max_steps=steps,
        max_epochs=-1,
        **options,
    )


def _row(run: Run, packing: str, number: int) -> dict[str, Any]:
    profile = profile_for(run, LAYERS)
    steps = trained(run, packing, number, setting_of(run).steps + 1)[1:]
    figures = [_figures(setting_of(run).config, profile, step) for step in steps]
    return {"profile": profile.name, "steps": figures}


def _figures(config: TransformerConfig, profile: Profile, step: RankStep) -> dict[str, Any]:
    """One step, measured and predicted."""
    plan = StepPlan.from_json(step.plan)
    stages = tuple(range(*part) for part in step.stages)
    predicted = Predictor(LatencyModel(profile, config.shape), stages).predict(plan)
    seconds = predicted.total_ns / 1e9
    return {
        "tokens": plan.tokens,
        "micro_batches": len(plan.replicas[0].forward),
        "seconds": step.wall,
        "tokens_per_second": plan.tokens / step.wall,
        "mfu": predicted.flops / step.wall / predicted.latency.profile.peak_flops,
        "peak_bytes": step.peak_bytes,
        "seconds_per_predicted": step.wall / seconds,
        "seconds_predicted": seconds,
        "peak_bytes_per_predicted": step.peak_bytes / predicted.peak_bytes,
        "peak_bytes_predicted": predicted.peak_bytes,
    }
