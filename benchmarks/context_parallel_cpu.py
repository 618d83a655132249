"""Context parallel 2 on two CPU cores, measured: the same steps under different shardings.

    python -m benchmarks.context_parallel_cpu

Two ranks, a core and a thread each, train a small decoder on the standard library's definitions.
Every sharding runs the same plans (same documents, same micro-batches) in every round, one sharding
after the other, every second round in reverse, so that a slow minute of the machine is everyone's.
Compared are medians of wall-clock time per token over all steps of all rounds; beside them the
spread of the ratio over rounds. Leave the machine alone meanwhile (five minutes). The last line of
the output is one JSON object; ``--output FOLDER`` also writes it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console

import lightning_wlb as wlb
from benchmarks import report
from benchmarks.measured import quiet_trainer

SHARDINGS = ("per_sequence", "per_document", "per_document_contiguous", "adaptive")


class Steps(L.Callback):
    """Seconds per token of every step but the first two, and context-level imbalance."""

    def __init__(self) -> None:
        self.microseconds: list[float] = []
        self.context: list[float] = []

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if batch_idx >= 2:
            figures = trainer.callback_metrics
            self.microseconds.append(1e6 * float(figures["wlb/step_seconds"]) / batch.tokens)
            self.context.append(float(figures["wlb/imbalance_context"]))


def run(sharding: str, arguments: argparse.Namespace) -> Steps:
    """One short training run."""
    model = wlb.LanguageModule(
        wlb.TransformerConfig.preset("tiny", layers=2, heads=1, kv_heads=1, vocab_size=1024), seed=0
    )
    data = wlb.WLBDataModule(
        wlb.StdlibDocuments(unit="definition", tokenizer="bpe", vocab_size=1024),
        context_window=arguments.context_window,
        micro_batches=2,
        packing="original",
        sharding=sharding,
        profile="none",
    )
    steps = Steps()
    trainer = quiet_trainer(
        strategy=wlb.WLBStrategy(context_parallel_size=2),
        devices=2,
        max_steps=arguments.steps + 2,
        # The monitor's figures are logged before the other callback reads them.
        callbacks=[wlb.ImbalanceMonitor(heat_map=False), steps],
    )
    trainer.fit(model, data)
    return steps


def main() -> None:
    parser = report.parser("context_parallel_cpu", __doc__)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each sharding")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--context-window", type=int, default=12_288, help="tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[Steps]] = {name: [] for name in SHARDINGS}
    for number in range(arguments.rounds):
        for sharding in SHARDINGS if number % 2 == 0 else reversed(SHARDINGS):
            runs[sharding].append(run(sharding, arguments))
    result = {name: figures(runs[name], runs[SHARDINGS[0]]) for name in SHARDINGS}
    if torch.distributed.get_rank() == 0:
        show(result)
        made = {
            "benchmark": "context_parallel_cpu",
            "measured": True,
            "device": "CPU, two ranks of one thread",
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "context_window": arguments.context_window,
            "shardings": result,
        }
        report.finish(made, arguments.output and arguments.output / "context_parallel_cpu")


def figures(runs: list[Steps], baseline: list[Steps]) -> dict[str, float]:
    """Medians over all steps, and the range of the ratio to the baseline over rounds."""

    def median(every: list[Steps]) -> float:
        return statistics.median(each for steps in every for each in steps.microseconds)

    ratios = [median([first]) / median([own]) for own, first in zip(runs, baseline, strict=True)]
    return {
        "microseconds_per_token_median": median(runs),
        "speedup": median(baseline) / median(runs),
        "speedup_least": min(ratios),
        "speedup_most": max(ratios),
        "imbalance_context_median": statistics.median(
            each for steps in runs for each in steps.context
        ),
    }


def show(result: dict[str, dict[str, float]]) -> None:
    title = "Context parallel 2, two ranks of one CPU thread each, wall clock, measured"
    headings = (
        "sharding", "µs per token", "per_sequence / this", "over rounds", "context imbalance",
    )  # fmt: skip
    rows = [
        [
            name,
            f"{row['microseconds_per_token_median']:.2f}",
            f"{row['speedup']:.3f}",
            f"{row['speedup_least']:.3f} to {row['speedup_most']:.3f}",
            f"{row['imbalance_context_median']:.3f}",
        ]
        for name, row in result.items()
    ]
    Console(width=110).print(report.table(title, headings, rows))


if __name__ == "__main__":
    main()
