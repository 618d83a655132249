r"""Compare packings on your documents' lengths, before a device is rented.

Plans steps for a model on a mesh, predicts what each takes on a device, and prints a table with
every packing against `original`: imbalance at each level, delay, step time, tokens per second,
model FLOP utilisation, memory peak, speed-up. Everything is simulated from a device profile; the
report says whether that was measured or put together from published figures.

  lightning-wlb plan --lengths generator-a --model 7b --mesh 1,4,2,8 \
      --context-window 131072 --profile h100
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_wlb.cli.arguments import add_model
from lightning_wlb.cli.lengths import GENERATOR_A, STORES
from lightning_wlb.cli.request import BASELINE, PRECISIONS, SHARDING_NAMES, Request
from lightning_wlb.cli.timelines import draw_gantt, write_trace
from lightning_wlb.cost.latency import Checkpointing
from lightning_wlb.cost.profile import shipped_profiles
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.settings import LongDocuments
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.schedule.simulate import Simulation
from lightning_wlb.sharding import ADAPTIVE

COMPARED = f"{BASELINE},wlb,{DataSettings.packing}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    data = parser.add_argument_group("documents")
    data.add_argument(
        "--lengths",
        required=True,
        help=f"{', '.join([*STORES, GENERATOR_A])}, or a .npy or text file of lengths in tokens",
    )
    data.add_argument("--context-window", type=int, required=True, help="C, in tokens")
    data.add_argument(
        "--micro-batches",
        type=int,
        help="N: a step is N·C tokens over all replicas (default: data × pipeline)",
    )
    data.add_argument(
        "--long-documents",
        choices=get_args(LongDocuments),
        default="error",
        help="what becomes of documents above the window (default: error)",
    )
    data.add_argument("--steps", type=int, default=100, help="steps to plan (default 100)")
    data.add_argument("--seed", type=int, default=0, help="of the order of documents (default 0)")

    run = parser.add_argument_group("model and devices")
    add_model(run)
    run.add_argument("--mesh", required=True, help="data,pipeline,context,tensor: 1,4,2,8")
    run.add_argument(
        "--profile",
        required=True,
        help=f"{', '.join(shipped_profiles())}, or a file that `lightning-wlb profile` wrote",
    )
    run.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of the run (default: bf16-mixed or what else the profile was made for)",
    )
    run.add_argument(
        "--device", choices=("cpu", "cuda"), help="refuse a profile of another kind of device"
    )
    run.add_argument(
        "--activation-checkpointing",
        choices=("auto", *get_args(Checkpointing)),
        default="auto",
        help="auto (default): the least with which every compared packing fits in memory",
    )

    how = parser.add_argument_group("what to compare")
    how.add_argument(
        "--packing",
        default=COMPARED,
        help=f"one or several of {', '.join(PACKINGS)} (default {COMPARED}); original is always"
        " compared",
    )
    how.add_argument("--cap", type=int, help="tokens of a micro-batch (default: the packing's)")
    how.add_argument(
        "--packing-option",
        action="append",
        default=[],
        metavar="METHOD.NAME=VALUE",
        help="an option of a packing, as in wlb.queues=3 or slim.micro_packs=8; may be repeated",
    )
    how.add_argument(
        "--sharding",
        default=ADAPTIVE,
        help=f"one or several of {', '.join(SHARDING_NAMES)} (default {ADAPTIVE})",
    )
    how.add_argument(
        "--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (default 1f1b)"
    )
    how.add_argument(
        "--virtual-stages",
        type=int,
        help="stages per pipeline rank (default: 2 for interleaved, else 1)",
    )

    out = parser.add_argument_group("output")
    out.add_argument("--picture", type=Path, help="PNG: a typical step of each row as a timeline")
    out.add_argument("--trace", type=Path, help="JSON of the same for Perfetto (ui.perfetto.dev)")
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace) -> None:
    """Plan, predict, print, and write what was asked for.

    Raises:
        ValueError: a mistake in the arguments, or a model that fits the mesh in no way; the
            message says what would fit.
    """
    console = Console(width=None if Console().is_terminal else 160)
    request = Request.of(arguments)
    mode, forecasts, others = request.forecasts(arguments.activation_checkpointing)
    baseline = forecasts[0]
    rows = [forecast.summary(baseline) for forecast in forecasts]
    longest = request.longest_micro_batch(request.predictor(mode))
    _show(console, request, mode, longest, rows)
    too_large = [
        {
            "packing": each.packing,
            "sharding": each.sharding,
            "peak_gigabytes": each.peak_bytes / 1e9,
        }
        for each in others
    ]
    for each in others:
        console.print(
            f"Does not fit in memory: {each.packing}, {each.sharding}, which would fill"
            f" {each.peak_bytes / 1e9:.1f} GB.",
            highlight=False,
        )
    timelines = {
        f"{forecast.packing}, {forecast.sharding}, {step.plan.tokens:,} tokens": _slowest_replica(
            step.simulations
        )
        for forecast in forecasts
        for step in [forecast.typical_step]
    }
    if arguments.picture is not None:
        draw_gantt(
            arguments.picture,
            timelines,
            f"A typical step, simulated: {arguments.model} on {request.mesh}\n"
            f"{request.profile.provenance}",
        )
        console.print(f"Picture: {arguments.picture}", soft_wrap=True, highlight=False)
    if arguments.trace is not None:
        write_trace(arguments.trace, timelines)
        console.print(f"Trace: {arguments.trace}", soft_wrap=True, highlight=False)
    if arguments.json:
        report = _report(arguments, request, mode, longest, rows)
        print(json.dumps(report | {"does_not_fit": too_large}))


def _slowest_replica(simulations: Sequence[Simulation]) -> Simulation:
    def end(simulation: Simulation) -> int:
        return max((span.end_ns for rank in simulation.spans for span in rank), default=0)

    return max(simulations, key=end)


def _show(
    console: Console,
    request: Request,
    mode: str,
    longest: int,
    rows: Sequence[dict[str, Any]],
) -> None:
    table = Table(
        title=f"Simulated: {_shape(request.config)} on {request.mesh}"
        f" ({request.mesh.devices} devices), {request.schedule}",
        caption=(
            f"{request.profile.provenance}{_extrapolated(request)}.\n"
            f"{len(request.lengths):,} documents, {rows[0]['steps']} steps. Activation"
            f" checkpointing: {mode}; micro-batches of up to {longest:,} tokens fit in memory if"
            f" all are as long. Imbalance degrees are aggregates, 1 is balanced. Speed-up over"
            f" {rows[0]['packing']}, {rows[0]['sharding']}: per token, and per model FLOP (cutting"
            " a document saves attention, so packings that cut differently differ here)."
        ),
        title_justify="left",
        caption_justify="left",
    )
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "packing": ("packing", str),
        "sharding": ("sharding", str),
        "imbalance_pipeline_aggregate": ("imbalance\npipeline", "{:.3f}".format),
        "imbalance_data_aggregate": ("\ndata", "{:.3f}".format),
        "imbalance_context_aggregate": ("\ncontext", "{:.3f}".format),
        "tokens_per_step": ("tokens\nper step", "{:,.0f}".format),
        "delay_mean": ("delay\n(steps)", "{:.2f}".format),
        "bubble": ("bubble", "{:.1%}".format),
        "step_ms_mean": ("step (ms)\nmean", "{:,.1f}".format),
        "step_ms_p99": ("\np99", "{:,.1f}".format),
        "tokens_per_second": ("tokens/s", "{:,.0f}".format),
        "model_flop_utilisation": ("MFU", "{:.1%}".format),
        "peak_gigabytes": ("memory\n(GB)", "{:.1f}".format),
        "speedup_per_token": ("speed-up\ntokens", "{:.3f}".format),
        "speedup_per_flop": ("\nFLOPs", "{:.3f}".format),
    }
    for heading, _ in columns.values():
        table.add_column(heading, justify="left" if heading in ("packing", "sharding") else "right")
    for row in rows:
        table.add_row(*(form(row[name]) for name, (_, form) in columns.items()))
    console.print(table)


def _extrapolated(request: Request) -> str:
    """A word of caution where the profile was measured on layers of other sizes."""
    measured, asked = request.profile.shape, asdict(request.config.shape)
    differs = any(measured[name] != asked[name] for name in measured if name != "layers")
    return f", measured on layers of dim {measured['dim']} and extrapolated" if differs else ""


def _shape(config: TransformerConfig) -> str:
    return (
        f"dim {config.dim}, {config.layers} layers, {config.heads} heads"
        f" ({config.kv_heads} key/value), vocabulary {config.vocab_size}"
    )


def _report(
    arguments: argparse.Namespace,
    request: Request,
    mode: str,
    longest: int,
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "command": "plan",
        "simulated": True,
        "profile": {
            "name": request.profile.name,
            "device": request.profile.device,
            "dtype": request.profile.dtype,
            "measured": request.profile.measured,
            "date": request.profile.date,
        },
        "lengths": arguments.lengths,
        "documents": len(request.lengths),
        "mean_length": float(np.mean(request.lengths)),
        "model": arguments.model,
        "mesh": arguments.mesh,
        "context_window": arguments.context_window,
        "micro_batches": arguments.micro_batches,
        "schedule": request.schedule,
        "virtual_stages": request.mesh.virtual_stages,
        "activation_checkpointing": mode,
        "longest_micro_batch": longest,
        "seed": arguments.seed,
        "rows": list(rows),
    }
