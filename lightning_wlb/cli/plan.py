r"""Compare packings on your documents' lengths, before a device is rented.

Plans steps for a model on a mesh, predicts what each takes on a device, and prints a table with
every packing against `original`: imbalance at each level, delay, step time, tokens per second,
model FLOP utilisation, memory peak, speed-up. It ends with a verdict in words. Everything is
simulated from a device profile; the report says whether that was measured or put together from
published figures.

  lightning-wlb plan --lengths generator-a --model 7b --mesh 1,4,2,8 \
      --context-window 131072 --profile h100

With --mesh auto it searches for the mesh instead (lightning_wlb.cli.meshes):

  lightning-wlb plan --lengths generator-a --model 7b --mesh auto --devices 64 \
      --devices-per-node 8 --micro-batches 16 --context-window 131072 --profile h100
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

from lightning_wlb.cli.forecast import Comparison, Verdict, compare, judged
from lightning_wlb.cli.meshes import run_search
from lightning_wlb.cli.request import (
    BASELINE,
    COMPARED,
    MESH_STEPS,
    PRECISIONS,
    REFERENCE,
    SHARDING_NAMES,
    STEPS,
    is_searched,
    requests_of,
)
from lightning_wlb.cli.shared_options import (
    GENERATOR_A,
    STORE_FILES,
    add_model,
    packing_option_names,
    report_head,
)
from lightning_wlb.cost.profile import shipped_profiles
from lightning_wlb.mesh import AXES
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import ActivationCheckpointing
from lightning_wlb.plan.plan_files import write_plans
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.settings import LongDocuments
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.schedule.simulator import Simulation
from lightning_wlb.sharding import ADAPTIVE

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "packing": ("packing", str),
    "sharding": ("sharding", str),
    "imbalance_pipeline_aggregate": ("imbalance\npipeline", "{:.3f}".format),
    "imbalance_data_aggregate": ("imbalance\ndata", "{:.3f}".format),
    "imbalance_context_aggregate": ("imbalance\ncontext", "{:.3f}".format),
    "tokens_per_step": ("tokens\nper step", "{:,.0f}".format),
    "tokens_per_step_spread": ("\n±", "{:.1%}".format),
    "delay_mean": ("delay\n(steps)", "{:.2f}".format),
    "idle": ("idle", "{:.1%}".format),
    "step_ms_mean": ("step (ms)\nmean", "{:,.1f}".format),
    "step_ms_p99": ("\np99", "{:,.1f}".format),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "model_flop_utilisation": ("MFU", "{:.1%}".format),
    "peak_gigabytes": ("memory\n(GB)", "{:.3g}".format),
    "recomputed": ("recom-\nputed", "{:.0%}".format),
    "speedup_per_token": ("speed-up\ntokens", "{:.3f}".format),
    "speedup_per_flop": ("speed-up\nFLOPs", "{:.3f}".format),
}
"""The figures of a row that the table shows: each one's heading and format."""

NEEDS_ONE = ("delay_mean", "recomputed")
"""Columns that are shown where a row has more than zero there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    add = parser.add_argument_group("documents").add_argument
    add(
        "--lengths",
        required=True,
        metavar="SOURCE",
        help=f"{GENERATOR_A}, a .npy or text file of lengths in tokens, or documents as"
        f" WLBDataModule takes them: stdlib, a folder or file ({', '.join(STORE_FILES)}), or a"
        " mapping, as in '{texts: texts.jsonl, tokenizer: tokenizer.json}'",
    )
    add(
        "--context-window",
        type=int,
        required=True,
        help="C: most tokens of a document in one micro-batch",
    )
    add(
        "--micro-batches",
        type=int,
        help="N: a step is N·C tokens over all replicas (default: data × pipeline; with --mesh auto"
        " it has to be given)",
    )
    add(
        "--long-documents",
        choices=get_args(LongDocuments),
        default=DataSettings.long_documents,
        help="what becomes of documents above the window (default: split, as in training)",
    )
    add(
        "--steps",
        type=int,
        help=f"steps to plan (default {STEPS}; with --mesh auto {MESH_STEPS} on each mesh)",
    )
    add("--seed", type=int, default=0, help="seed of the documents' order (default 0)")

    run = parser.add_argument_group("model and devices")
    add = run.add_argument
    add_model(
        run,
        also="; or a Hugging Face config: its config.json or the folder of that, a name on the hub;"
        " or a LightningCLI YAML with a config",
    )
    add(
        "--mesh",
        required=True,
        metavar="D,P,C,T",
        help="ranks of data, pipeline, context and tensor parallelism, as in 1,4,2,8; auto: the"
        " fastest mesh of --devices is searched for, as in auto or auto,2,auto,1",
    )
    add("--devices", type=int, help="number of devices, with --mesh auto")
    add("--devices-per-node", type=int, help="devices of a node (default: as the profile says)")
    add(
        "--profile",
        required=True,
        help=f"device profile: {', '.join(shipped_profiles())}, or a file that `lightning-wlb"
        " profile` wrote",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        help="precision of the run (default: bf16-mixed, or one of the profile's dtype)",
    )
    add(
        "--reduce-dtype",
        choices=("float32", "bfloat16"),
        help="dtype in which tensor- and context-parallel ranks send what they add up (default:"
        " float32 or wider)",
    )
    add("--compile", action="store_true", help="predict runs of modules with compile=True")
    add(
        "--overlap",
        choices=("auto", "off"),
        default="auto",
        help="off: predict runs of WLBStrategy(overlap='off'), whose products wait for messages",
    )
    add(
        "--activation-checkpointing",
        choices=get_args(ActivationCheckpointing),
        help="auto: each plan chooses for each micro-batch, as little as memory allows (default:"
        " what the YAML says, or auto)",
    )

    add = parser.add_argument_group("what to compare").add_argument
    add(
        "--packing",
        metavar="NAMES",
        help=f"one or several of {', '.join(PACKINGS)}, with commas between them (default"
        f" {COMPARED}); {BASELINE} and {REFERENCE} are always compared. With --mesh auto one"
        f" (default {DataSettings.packing}), compared with {REFERENCE}",
    )
    add(
        "--cap",
        type=int,
        help="most tokens of a micro-batch (default: the packing's own, C or 1.5·C)",
    )
    add(
        "--packing-option",
        action="append",
        default=[],
        metavar="METHOD.NAME=VALUE",
        help="an option of a packing that is compared; may be repeated. Options and defaults:"
        f" {', '.join(packing_option_names())}",
    )
    add(
        "--sharding",
        default=ADAPTIVE,
        metavar="NAMES",
        help=f"one or several of {', '.join(SHARDING_NAMES)} (default {ADAPTIVE})",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help="pipeline schedule (default 1f1b; with --mesh auto also interleaved)",
    )
    add(
        "--virtual-stages",
        type=int,
        help="stages per pipeline rank (default: 2 for interleaved, else 1; with --mesh auto the"
        " fastest of 1, 2 and 4)",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--picture",
        type=Path,
        help="PNG: a typical step of each row as a timeline, and who waits for whom",
    )
    add("--trace", type=Path, help="JSON of the same for Perfetto (ui.perfetto.dev)")
    add(
        "--write",
        type=Path,
        metavar="PLANS.jsonl",
        help="write the plans of the last row, one step a line (docs/planner.md says what a line"
        " means)",
    )
    add("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace) -> None:
    """Plan, predict, print, and write the files that were asked for.

    Raises:
        ValueError: a mistake in the arguments, or a model that does not fit on the mesh; the
            message says what would fit.
    """
    console = Console(width=None if Console().is_terminal else 180)
    requests = requests_of(arguments)
    if is_searched(arguments):
        run_search(arguments, requests, console)
        return
    request = requests[0]
    comparison = compare(requests)
    console.print(_table(comparison))
    for row in comparison.too_large:
        filled = (
            f"{row.packing}, {row.sharding}, which would fill {row.row.peak_bytes / 1e9:.3g} GB"
        )
        console.print(f"Does not fit in memory: {filled}.", highlight=False)
    verdict = judged(comparison)
    for line in verdict.lines:
        console.print(line, highlight=False)
    if arguments.write is not None:
        row = comparison.forecasts[-1]
        about = report_head(arguments, request.profile, request.lengths)
        about |= {"packing": row.packing, "sharding": row.sharding}
        write_plans(arguments.write, (step.plan for step in row.steps), about)
        told = f"Plans of {len(row.steps)} steps with packing {row.packing}: {arguments.write}"
        console.print(told, soft_wrap=True, highlight=False)
    if arguments.picture is not None or arguments.trace is not None:
        from lightning_wlb.cli.pictures import draw_gantt, write_trace

        shown = _typical_steps(comparison)
        if arguments.picture is not None:
            title = f"A typical step, simulated: {arguments.model} on {request.mesh}"
            draw_gantt(arguments.picture, shown, f"{title}\n{request.profile.provenance}")
            console.print(f"Picture: {arguments.picture}", soft_wrap=True, highlight=False)
        if arguments.trace is not None:
            write_trace(arguments.trace, shown)
            console.print(f"Trace: {arguments.trace}", soft_wrap=True, highlight=False)
    if arguments.json:
        report = _report(arguments, comparison, verdict)
        print(json.dumps(report))


def _typical_steps(comparison: Comparison) -> dict[str, Sequence[Simulation]]:
    """A step of each row, typical of it and of about as many tokens as those of the others."""
    data = comparison.request.data
    steps = [
        (row, row.typical_step(data.micro_batches * data.context_window))
        for row in comparison.forecasts
    ]
    return {
        f"{row.packing}, {row.sharding}, {step.plan.tokens:,} tokens": step.simulations
        for row, step in steps
    }


def _table(comparison: Comparison) -> Table:
    request, rows, shape = comparison.request, comparison.rows, comparison.request.shape
    table = Table(
        title=f"Simulated: dim {shape.dim}, {shape.layers} layers, {shape.heads} heads"
        f" ({shape.kv_heads} key/value), vocabulary {shape.vocab_size} on {request.mesh}"
        f" ({request.mesh.devices} devices)"
        f"{f', {request.schedule}' if request.mesh.pipeline > 1 else ''}",
        caption=(
            f"{request.profile.provenance}{_extrapolated(request)}.{_caution(request)}\n"
            f"{len(request.lengths):,} documents, {request.steps} steps. Activation"
            f" checkpointing: {request.activation_checkpointing}. Imbalance degrees are aggregates,"
            " 1 is balanced. Idle: of the ranks' time, waits for slower replicas included."
            f" Speed-up over {rows[0]['packing']}, {rows[0]['sharding']}: per token, and per model"
            " FLOP (cutting a document saves attention, so packings that cut differently differ"
            " here)."
            f"{_hidden(comparison)}"
        ),
        title_justify="left",
        caption_justify="left",
    )
    flat = [f"imbalance_{axis}_aggregate" for axis in AXES if getattr(request.mesh, axis) == 1]
    left_out = {*flat, *(name for name in NEEDS_ONE if not any(row[name] for row in rows))}
    shown = {name: column for name, column in COLUMNS.items() if name not in left_out}
    for heading, _ in shown.values():
        table.add_column(heading, justify="left" if heading in ("packing", "sharding") else "right")
    for row in rows:
        table.add_row(*(form(row[name]) for name, (_, form) in shown.items()))
    return table


def _hidden(comparison: Comparison) -> str:
    """How much of tensor-parallel communication is behind products."""
    shares = [row.hidden for row in comparison.forecasts]
    if not any(shares):  # no such messages, or a model whose products wait for them
        return ""
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    share = least if least == most else f"{least} to {most}"
    return f" Of the time of tensor-parallel messages {share} is hidden behind products."


def _extrapolated(request: MeshRequest) -> str:
    """A caution if the profile was measured on layers of other sizes."""
    measured, asked = request.profile.shape, asdict(request.shape)
    differs = any(measured[name] != asked[name] for name in measured if name != "layers")
    return f", measured on layers of dim {measured['dim']} and extrapolated" if differs else ""


def _caution(request: MeshRequest) -> str:
    """A caution if the model's layers are not like the decoder's that the times were fitted to."""
    if any(layer.idle_parameters for layer in request.shape.kinds):
        return " Experts are taken to compute at the rate of dense layers."
    return ""


def _report(
    arguments: argparse.Namespace, comparison: Comparison, verdict: Verdict
) -> dict[str, Any]:
    request = comparison.request
    return report_head(arguments, request.profile, request.lengths) | {
        "mean_length": float(np.mean(request.lengths)),
        "context_window": arguments.context_window,
        "micro_batches": request.data.micro_batches,
        "schedule": request.schedule,
        "virtual_stages": request.mesh.virtual_stages,
        "activation_checkpointing": request.activation_checkpointing,
        "rows": comparison.rows,
        "verdict": verdict.figures,
        "does_not_fit": [
            dict(
                packing=row.packing, sharding=row.sharding, peak_gigabytes=row.row.peak_bytes / 1e9
            )
            for row in comparison.too_large
        ],
    }
