"""Train a small decoder on Python's own standard library twice, unbalanced and balanced.

    python examples/train_stdlib.py            # what `make train` runs
    python examples/train_stdlib.py --help

The same documents (top-level functions and classes as byte pairs), the same model and the same
number of tokens run first with ``original`` packing (concatenate and cut at the context window,
replicas take turns) and then with ``wlb`` packing. One rank per core with one thread each: with
more ranks than cores an idle rank's core does another rank's work, and imbalance does not show in
wall-clock time. Two cores run data parallel 2, four or more pipeline 2 × data 2.

The model is small and the window long, so that attention carries more than half of the work, as
it does in long-context training of large models.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lightning_wlb as wlb

VOCABULARY = 1024


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
        # What memory allows a micro-batch to hold; short documents fill up beside long ones.
        cap=None if packing == "original" else 2 * arguments.context_window,
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


@rank_zero_only
def report(before: wlb.ImbalanceMonitor, after: wlb.ImbalanceMonitor, names: list[str]) -> None:
    """The two runs side by side."""
    table = Table(title="\nMeasured, the same documents in both runs", title_justify="left")
    for heading in ("", *names, f"{names[0]} / {names[1]}"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = [
        *(
            (f"imbalance, {level} level, {how}", f"imbalance_{level}_{how}", 1, "x")
            for level in ("pipeline", "data", "context")
            for how in ("aggregate", "mean", "p99")
        ),
        ("step time (s)", "seconds_per_step", 1, "x"),
        ("time per token (µs)", "seconds_per_million_tokens", 1, "x"),
        ("time per model TFLOP, per rank (s)", "tflops_per_device", -1, "x"),
        ("tokens per step", "tokens_per_step", 1, ""),
        ("delay of a token, mean (steps)", "delay_mean", 1, ""),
        ("delay of a token, maximum (steps)", "delay_max", 1, ""),
        ("steps", "steps", 1, ""),
    ]
    first, second = before.summary(), after.summary()
    for label, key, power, ratio in rows:
        values = [summary[key] ** power for summary in (first, second)]
        shown = [
            f"{value:,.0f}" if key.startswith(("tokens", "steps")) else f"{value:.3f}"
            for value in values
        ]
        table.add_row(label, *shown, f"{values[0] / values[1]:.3f}" if ratio else "")
    console = Console()
    console.print(table)
    console.print(
        "Time per token also pays for longer contexts: original packing cuts documents at window"
        " boundaries, and what is cut attends to less. Time per model TFLOP compares like with"
        " like."
    )
    for name, monitor in zip(names, (before, after), strict=True):
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
    add("--max-tokens", type=int, default=2_000_000, help="length of each run, in tokens")
    add("--learning-rate", type=float, default=3e-3)
    add("--packing", nargs=2, default=["original", "wlb"], help="the two methods to compare")
    add("--seed", type=int, default=0)
    add("--output", default="runs", help="folder for metrics and heat maps")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's own, under torch 2.13
    torch.set_num_threads(1)
    options = parse()
    monitors = [run(packing, options) for packing in options.packing]
    report(*monitors, options.packing)
