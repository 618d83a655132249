"""Context parallel 2 on two CPU cores, measured: the same steps under different shardings.

    python -m benchmarks.context_parallel_cpu

Two ranks, a core and a thread each, train a small decoder on the standard library's definitions.
Every sharding runs the same plans (same documents, same micro-batches); runs alternate and the
medians over all their steps are compared. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console
from rich.table import Table

import lightning_wlb as wlb

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
    )
    steps = Steps()
    trainer = L.Trainer(
        strategy=wlb.WLBStrategy(context_parallel_size=2),
        accelerator="cpu",
        devices=2,
        max_steps=arguments.steps + 2,
        # The monitor's figures are logged before the other callback reads them.
        callbacks=[wlb.ImbalanceMonitor(heat_map=False), steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each sharding")
    parser.add_argument("--context-window", type=int, default=12_288, help="tokens")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    measured: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in SHARDINGS}
    for _ in range(arguments.rounds):
        for sharding in SHARDINGS:
            steps = run(sharding, arguments)
            measured[sharding][0].extend(steps.microseconds)
            measured[sharding][1].extend(steps.context)
    result = {
        name: {
            "microseconds_per_token_median": statistics.median(seconds),
            "imbalance_context_median": statistics.median(context),
        }
        for name, (seconds, context) in measured.items()
    }
    first = result[SHARDINGS[0]]["microseconds_per_token_median"]
    table = Table(title="Context parallel 2, CPU, measured")
    for heading in ("sharding", "µs per token", "per_sequence / this", "context imbalance"):
        table.add_column(heading, justify="right" if heading != "sharding" else "left")
    for name, figures in result.items():
        figures["speedup"] = first / figures["microseconds_per_token_median"]
        table.add_row(
            name,
            f"{figures['microseconds_per_token_median']:.2f}",
            f"{figures['speedup']:.3f}",
            f"{figures['imbalance_context_median']:.3f}",
        )
    if torch.distributed.get_rank() == 0:
        Console().print(table)
        print(json.dumps({"device": "CPU, two ranks of one thread", **result}))


if __name__ == "__main__":
    main()
