r"""Compare packings on your documents' lengths, before a device is rented.

Plans steps for a model on a mesh, predicts what each takes on a device, and prints a table with
every packing against `original`: imbalance at each level, delay, step time, tokens per second,
model FLOP utilisation, memory peak, speed-up. It ends with a verdict in words. Everything is
simulated from a device profile; the report says whether that was measured or published.

  lightning-wlb plan --lengths generator-a --model 7b --mesh 1,4,2,8 \
      --context-window 131072 --profile h100

With --mesh auto it searches for the mesh instead (lightning_wlb.cli.meshes):

  lightning-wlb plan --lengths generator-a --model 7b --mesh auto --devices 64 \
      --devices-per-node 8 --micro-batches 16 --context-window 131072 --profile h100
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from lightning_wlb.callbacks.run_summary import new_table
from lightning_wlb.cli.forecast import Comparison, Verdict, compare, judged, provenance, report_head
from lightning_wlb.cli.meshes import run_search
from lightning_wlb.cli.request import (
    BASELINE,
    COMPARED,
    DEFAULT,
    MESH_STEPS,
    PRECISIONS,
    REFERENCE,
    STEPS,
    is_searched,
    requests_of,
)
from lightning_wlb.cli.shared_options import GENERATOR_A, STORE_FILES, add_model
from lightning_wlb.cost.profile import shipped_profiles
from lightning_wlb.mesh import AXES
from lightning_wlb.plan import ActivationCheckpointing
from lightning_wlb.plan.plan_files import write_plans
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.settings import LongDocuments
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "packing": ("packing", str),
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
"""Columns that are shown only if a row has more than zero in them."""


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
        help="N: a step is about N·C tokens over all replicas (default: data × pipeline; with"
        " --mesh auto it has to be given)",
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
        help=f"{', '.join(shipped_profiles())}, or a file that `lightning-wlb profile` wrote",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        help="precision of the run (default: bf16-mixed, or one of the profile's dtype)",
    )
    add(
        "--reduce-dtype",
        choices=("float32", "bfloat16"),
        help="dtype in which tensor- and context-parallel ranks send sums (default: >= float32)",
    )
    add("--compile", action="store_true", help="predict runs of modules with compile=True")
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
        f" (default {DEFAULT}), compared with {REFERENCE}",
    )
    add(
        "--cap",
        type=int,
        help="most tokens of a micro-batch (default: the packing's own, C or 1.5·C)",
    )
    add(
        "--sharding",
        choices=(ADAPTIVE, *SHARDINGS),
        default=ADAPTIVE,
        help=f"how a micro-batch lies on context-parallel ranks (default {ADAPTIVE})",
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
    add(
        "--write",
        type=Path,
        metavar="PLANS.jsonl",
        help="write the plans of the last row, one step a line (see docs/planner.md)",
    )
    add("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace) -> None:
    """Plan, predict, print, and write the files that were asked for."""
    width = None if Console().is_terminal else 180
    console = Console(width=width, markup=False, highlight=False)
    requests = requests_of(arguments)
    if is_searched(arguments):
        run_search(arguments, requests, console)
        return
    request = requests[0]
    packings = ", ".join(each.data.packing_choice.method for each in requests)
    told = f"Simulating {request.steps} steps with {packings}: up to half a minute for 64 devices."
    print(told, file=sys.stderr, flush=True)
    comparison = compare(requests)
    verdict = judged(comparison)
    console.print(_table(comparison))
    for row in comparison.too_large:
        filled = f"{row.packing}, which would fill {row.row.peak_bytes / 1e9:.3g} GB"
        console.print(f"Does not fit in memory: {filled}.")
    console.print(*verdict.lines, sep="\n")
    head = report_head(request, arguments.lengths, arguments.model, arguments.mesh)
    if arguments.write is not None:
        row = comparison.forecasts[-1]
        about = head | {"packing": row.packing}
        write_plans(arguments.write, (step.plan for step in row.steps), about)
        told = f"Plans of {len(row.steps)} steps with packing {row.packing}: {arguments.write}"
        console.print(told, soft_wrap=True)
    if arguments.picture is not None:
        from lightning_wlb.cli.pictures import draw_gantt

        shown = {}
        for row in comparison.forecasts:
            step, mean = row.typical_step, row.row.steps_ns / row.row.steps / 1e6
            name = f"{row.packing}, mean {mean:,.1f} ms; this step of {step.plan.tokens:,} tokens"
            shown[name] = step.simulations
        draw_gantt(
            arguments.picture,
            shown,
            f"A typical step, simulated: {arguments.model} on {request.mesh}\n"
            f"{request.profile.provenance}",
        )
        console.print(f"Picture: {arguments.picture}", soft_wrap=True)
    if arguments.json:
        print(json.dumps(head | _figures(comparison, verdict)))


def _table(comparison: Comparison) -> Table:
    request, rows, shape = comparison.request, comparison.rows, comparison.request.shape
    shares = ", ".join(f"{row['packing']} {row['hidden_messages']:.0%}" for row in rows)
    hidden = f" Behind products, of the time of tensor-parallel messages: {shares}."
    if not any(row["hidden_messages"] for row in rows):
        hidden = ""
    flat = [f"imbalance_{axis}_aggregate" for axis in AXES if getattr(request.mesh, axis) == 1]
    left_out = {*flat, *(name for name in NEEDS_ONE if not any(row[name] for row in rows))}
    shown = {name: column for name, column in COLUMNS.items() if name not in left_out}
    table = new_table(
        f"Simulated: dim {shape.dim}, {shape.layers} layers, {shape.heads} heads"
        f" ({shape.kv_heads} key/value), vocabulary {shape.vocab_size} on {request.mesh}"
        f" ({request.mesh.devices} devices), sharding {request.sharding}"
        f"{f', {request.schedule}' if request.mesh.pipeline > 1 else ''}",
        f"{provenance(request)}\n{len(request.lengths):,} documents, {request.steps} steps."
        f" Activation checkpointing: {request.activation_checkpointing}. Imbalance degrees are"
        " aggregates, 1 is balanced. Idle: of the ranks' time, waits for slower replicas included."
        f" Speed-up over {rows[0]['packing']}: per token, and per model FLOP (cutting a document"
        f" saves attention, so packings that cut differently differ here).{hidden}",
        [heading for heading, _ in shown.values()],
    )
    for row in rows:
        table.add_row(*(form(row[name]) for name, (_, form) in shown.items()))
    return table


def _figures(comparison: Comparison, verdict: Verdict) -> dict[str, Any]:
    """The entries of the JSON report about the packings."""
    request = comparison.request
    return {
        "schedule": request.schedule,
        "virtual_stages": request.mesh.virtual_stages,
        "activation_checkpointing": request.activation_checkpointing,
        "rows": comparison.rows,
        "verdict": verdict.figures,
        "does_not_fit": [
            {"packing": row.packing, "peak_gigabytes": row.row.peak_bytes / 1e9}
            for row in comparison.too_large
        ],
    }
