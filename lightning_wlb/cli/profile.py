"""Measure this device and write a device profile.

Runs the attention kernels and decoder layers of a model on the device, fits the latency model to
them, judges it by windows of documents like those of long-context pretraining, which the fit has
not seen, and writes a JSON file for `plan --profile`. One to two minutes on an idle CPU.

  lightning-wlb profile --model tiny --output mine.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from rich.console import Console

from lightning_wlb.argument_checks import whole
from lightning_wlb.attention.backends import BACKENDS
from lightning_wlb.cli.shared_options import add_model, model_config
from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.profiling.device_profile import measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    add_model(parser)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to measure (default: cuda where there is one)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPE_BYTES,
        help="dtype of the model (default: bfloat16 on cuda, float32 on a cpu)",
    )
    parser.add_argument(
        "--attention-backend",
        choices=("auto", *BACKENDS),
        default="auto",
        help="backend of the run that the profile is for (default: auto)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of a CPU rank (default 1: a core for each rank)",
    )
    parser.add_argument(
        "--no-links", action="store_true", help="do not start processes to measure messages"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, report the fit's error, and write the profile."""
    console = Console(markup=False, highlight=False)
    config = model_config(arguments.model)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here. Use --device cpu.")
    cores = os.cpu_count() or 1
    if whole("--threads", arguments.threads, 1) > cores:
        raise ValueError(f"--threads {arguments.threads}: this machine has {cores} cores.")
    folder = arguments.output.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--output {arguments.output}: there is no folder {folder}.")
    if arguments.output.is_dir():
        raise ValueError(f"--output {arguments.output} is a folder. Name a file to write.")
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    torch.set_num_threads(arguments.threads)
    profile = measure(
        config,
        name=arguments.output.stem,
        device=torch.device(arguments.device),
        dtype=getattr(torch, dtype),
        links=not arguments.no_links,
        backend=arguments.attention_backend,
        report=lambda text: console.print(f"Measuring: {text}"),
    )
    arguments.output.write_text(profile.to_json(), encoding="utf-8")
    console.print(profile.provenance, soft_wrap=True)
    console.print(
        f"Prediction against measurement, {profile.errors['micro_batches']:.0f} micro-batches held"
        f" out of the fit: median error {profile.errors['median']:.1%}, worst"
        f" {profile.errors['worst']:.1%}.\nWritten: {arguments.output}",
        soft_wrap=True,
    )
