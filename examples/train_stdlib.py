"""Train a small decoder on Python's own standard library with three packings, and compare.

    python examples/train_stdlib.py            # what `make train` runs
    python examples/train_stdlib.py --help

The same documents (top-level functions and classes as byte pairs), the same model and the same
number of tokens run with ``original`` packing (concatenate and cut at the context window, replicas
take turns), with ``best_fit`` packing (whole documents in as few windows as they fit, as axolotl
and TRL pack) and with ``auto``, the package's default, which shares a long document among replicas
and slices it for a pipeline. One rank per core with one thread each: with more ranks than cores an
idle rank's core does another rank's work, and imbalance does not show in wall-clock time. Two cores
run data parallel 2, four or more pipeline 2 × data 2.

The model is small and the window long, so that attention carries more than half of the work, as
it does in long-context training of large models.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lightning_wlb as wlb

VOCABULARY = 1024
# These balance by micro-batches longer than a window: they may use what memory allows one to hold,
# and short documents fill up beside long ones.
ABOVE_WINDOWS = ("wlb", "balanced", "varlen_ilp")


def run(packing: str, arguments: argparse.Namespace) -> wlb.ImbalanceMonitor:
    """One training run; the monitor that watched it."""
    pipeline, data_parallel = mesh(arguments.devices)
    L.seed_everything(arguments.seed, verbose=False)
    model = wlb.LanguageModule(
        wlb.TransformerConfig.preset("tiny", layers=2, heads=1, kv_heads=1, vocab_size=VOCABULARY),
        learning_rate=arguments.learning_rate,
        warmup_tokens=20 * arguments.context_window,
    )
    data = wlb.WLBDataModule(
        wlb.StdlibDocuments(unit="definition", tokenizer="bpe", vocab_size=VOCABULARY),
        context_window=arguments.context_window,
        micro_batches=pipeline * data_parallel,
        packing=packing,
        cap=2 * arguments.context_window if packing in ABOVE_WINDOWS else None,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    folder = Path(arguments.output)
    monitor = wlb.ImbalanceMonitor(heat_map=folder / f"imbalance-{packing}.png")
    trainer = L.Trainer(
        strategy=wlb.WLBStrategy(pipeline_parallel_size=pipeline),
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=1,  # max_tokens ends the run before that
        gradient_clip_val=1.0,
        callbacks=[monitor],
        logger=CSVLogger(folder, name=packing),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print(f"\n{packing} packing, {arguments.devices} ranks of one thread")
    trainer.fit(model, data)
    return monitor


def mesh(devices: int) -> tuple[int, int]:
    """(pipeline, data) parallel sizes."""
    return (2, devices // 2) if devices >= 4 and devices % 2 == 0 else (1, devices)


def comparison(summaries: Sequence[dict[str, float]], names: Sequence[str]) -> Table:
    """The runs side by side, and how many times the last one's figure each of the others is.

    Args:
        summaries: what the monitors of the runs say.
        names: of the packings.
    """
    *others, last = names
    table = Table(title="\nMeasured, the same documents in all runs", title_justify="left")
    table.add_column("")
    for heading in (*names, *(f"{name}\n/ {last}" for name in others)):
        table.add_column(heading, justify="right")
    # What is shown, the key of the summary, what it is multiplied by (None: its reciprocal), and
    # with how many digits; whether it is compared.
    rows = [
        ("imbalance, pipeline", "imbalance_pipeline_aggregate", 1, 3, True),
        ("  99th percentile", "imbalance_pipeline_p99", 1, 3, True),
        ("imbalance, data", "imbalance_data_aggregate", 1, 3, True),
        ("  99th percentile", "imbalance_data_p99", 1, 3, True),
        ("µs per token", "seconds_per_million_tokens", 1, 2, True),
        ("  median step", "seconds_per_million_tokens_median", 1, 2, True),
        ("s per model TFLOP", "tflops_per_device", None, 2, True),
        ("  median step", "tflops_per_device_median", None, 2, True),
        ("s per step", "seconds_per_step", 1, 3, False),
        ("ms wait for loader", "loader_wait_seconds", 1e3, 1, False),
        ("tokens per step", "tokens_per_step", 1, 0, False),
        ("delay, mean (steps)", "delay_mean", 1, 2, False),
        ("  maximum", "delay_max", 1, 0, False),
        ("steps measured", "timed_steps", 1, 0, False),
    ]
    for label, key, factor, digits, compared in rows:
        values = [1 / each[key] if factor is None else factor * each[key] for each in summaries]
        ratios = [f"{value / values[-1]:.3f}" if compared else "" for value in values[:-1]]
        table.add_row(label, *(f"{value:,.{digits}f}" for value in values), *ratios)
    return table


@rank_zero_only
def report(monitors: Sequence[wlb.ImbalanceMonitor], names: Sequence[str]) -> None:
    """The runs side by side, on rank 0."""
    console = Console()
    console.print(comparison([monitor.summary() for monitor in monitors], names))
    console.print(
        "Time per token also pays for longer contexts: original packing cuts documents at window"
        " boundaries, and what is cut attends to less. Time per model TFLOP, of a rank, compares"
        " like with like."
    )
    for name, monitor in zip(names, monitors, strict=True):
        console.print(f"Heat map, {name}: {monitor.heat_map_path}", soft_wrap=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add("--devices", type=int, default=max(1, min(cores or 1, 4) // 2 * 2), help="ranks")
    add("--context-window", type=int, default=12_288, help="longest piece, in tokens")
    add("--max-tokens", type=int, default=1_150_000, help="length of each run, in tokens")
    add("--learning-rate", type=float, default=3e-3)
    add("--packing", nargs="+", default=["original", "best_fit", "auto"],
        help="the methods to compare; the others are divided by the last")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--output", default="runs", help="folder for metrics and heat maps")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's own, under torch 2.13
    torch.set_num_threads(1)
    options = parse()
    report([run(packing, options) for packing in options.packing], options.packing)
