"""`lightning-wlb plan --mesh auto`: which mesh to take, and what balancing gains there.

The search is :func:`~lightning_wlb.mesh_search.search.choose_mesh`, with the packing asked for,
with ``original`` and with ``best_fit``, so that the verdict compares each on its own best mesh.
Everything is simulated from the device profile. ``--mesh`` with a printed row's mesh repeats it.

Cost: ten to thirty seconds for 64 devices, one to two and a half for 1,024.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_wlb.callbacks.run_summary import new_table
from lightning_wlb.cli.forecast import Forecast, Verdict, provenance, report_head
from lightning_wlb.cli.request import BASELINE, DEFAULT, PRECISIONS, REFERENCE
from lightning_wlb.cli.shared_options import given_model
from lightning_wlb.mesh import AXES
from lightning_wlb.mesh_search.evaluate import MeshChoice
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import Progress, choose_mesh, progress_bar
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.sharding import ADAPTIVE

SHOWN = 5
"""Meshes in the table."""


def run_search(
    arguments: argparse.Namespace, requests: Sequence[MeshRequest], console: Console
) -> None:
    """Search by requests for baseline, reference and the packing asked for; print the answer."""
    by_packing = {each.data.packing_choice.method: each for each in requests}
    packing = arguments.packing or DEFAULT
    request = by_packing[packing]
    with progress_bar(f"Simulating meshes of {request.devices} devices") as tell:
        found = choose_mesh(request, progress=tell)
        original, reference = (_best_of(by_packing[name], tell) for name in (BASELINE, REFERENCE))
    verdict = Verdict(request, Forecast(packing, found.best), original, reference, searched=True)
    console.print(_table(request, found))
    left = (
        f"Left out, {each.count}: {each.reason} (as {each.example})." for each in found.left_out
    )
    console.print(*left, *verdict.lines, "\nNext, to train so:", sep="\n")
    training = trainer_lines(arguments, verdict)
    console.print(*training, sep="\n", soft_wrap=True)
    if arguments.json:
        head = report_head(request, arguments.lengths, arguments.model, arguments.mesh)
        print(json.dumps(head | _figures(request, found, verdict, training)))


def _best_of(request: MeshRequest, tell: Progress) -> Forecast | None:
    """The packing of a request on its best mesh; None if it fits on none."""
    try:
        found = choose_mesh(request, progress=tell)
    except ValueError:
        return None
    return Forecast(request.data.packing_choice.method, found.best)


def trainer_lines(arguments: argparse.Namespace, verdict: Verdict) -> list[str]:
    """How to train as advised: a ``fit`` command if the model is in a YAML, else Python code."""
    model, sections = given_model(arguments.model), _sections(arguments, verdict)
    if model.file:
        data = arguments.lengths if Path(arguments.lengths).exists() else "DOCUMENTS"
        sections["model"] |= {f"config.{name}": value for name, value in model.changes.items()}
        lines = [f"lightning-wlb fit --config {shlex.quote(model.file)} --trainer.strategy wlb"]
        for section, given in sections.items():
            texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in given.items()}
            words = (f"--{section}.{name} {shlex.quote(text)}" for name, text in texts.items())
            lines.append(" ".join(words))
        return [" \\\n    ".join([*lines, f"--data.documents {shlex.quote(data)}"])]
    python = {
        section: ", ".join(f"{name}={value!r}" for name, value in given.items())
        for section, given in sections.items()
    }
    module = "LanguageModule(..."
    if model.foreign:
        folder, *_ = arguments.model.split(",")
        changes = "".join(f", {name}={value!r}" for name, value in model.changes.items())
        config = f"AutoConfig.from_pretrained({folder!r}{changes})" if changes else repr(folder)
        module = f"HuggingFaceModule({config}, pretrained=..."
    return [
        f"Trainer({python['trainer']}, strategy=WLBStrategy({python['wlb']}))",
        f"{module}, {python['model']})",
        f"WLBDataModule(..., {python['data']})",
    ]


def _sections(arguments: argparse.Namespace, verdict: Verdict) -> dict[str, dict[str, Any]]:
    """The arguments of Trainer, strategy, module and data module."""
    row, method = verdict.advised.row, verdict.advised.packing
    request, profile, data = verdict.request, verdict.request.profile, verdict.request.data
    nodes, rest = divmod(request.devices, profile.devices_per_node)
    trainer: dict[str, Any] = {"devices": request.devices}
    if nodes > 1 and not rest:
        trainer = {"devices": profile.devices_per_node, "num_nodes": nodes}
    computed = profile.dtype, request.rest_dtype
    (trainer["precision"],) = (name for name, types in PRECISIONS.items() if types == computed)
    sizes = zip(AXES, row.mesh.shape, strict=True)
    wlb: dict[str, Any] = {f"{axis}_parallel_size": size for axis, size in sizes}
    wlb["schedule"] = row.schedule
    if request.reduce_dtype != "float32":
        wlb["reduce_dtype"] = request.reduce_dtype
    if row.mesh.virtual_stages > 1 or row.schedule == "interleaved":  # which has 2 by default
        wlb["virtual_pipeline_size"] = row.mesh.virtual_stages
    module = {"activation_checkpointing": row.activation_checkpointing}
    others = {
        "sharding": None if request.sharding == ADAPTIVE else request.sharding,
        "cap": None if PACKINGS[method].cuts_stream else arguments.cap,
        "long_documents": None if data.long_documents == "split" else data.long_documents,
        "seed": data.seed or None,
    }
    given = {
        "context_window": data.context_window,
        "micro_batches": data.micro_batches,
        "packing": method,
        **{name: value for name, value in others.items() if value is not None},
        "profile": arguments.profile,
    }
    compiled = {"compile": True} if request.compiled else {}
    return {"trainer": trainer, "wlb": wlb, "model": module | compiled, "data": given}


def _table(request: MeshRequest, found: MeshChoice) -> Table:
    shape = request.shape
    figures = ("virtual\nstages", "recom-\nputed", "step\n(ms)", "tokens/s", "memory\n(GB)", "idle")
    headings = (*AXES, *figures, "beside arithmetic, most time goes to")
    table = new_table(
        f"Simulated: dim {shape.dim}, {shape.layers} layers, {shape.heads} heads"
        f" ({shape.kv_heads} key/value), vocabulary {shape.vocab_size} on {request.devices}"
        f" devices, {request.profile.devices_per_node} to a node; packing"
        f" {request.data.packing_choice.method}",
        f"{provenance(request)}\n{len(request.lengths):,} documents,"
        f" {request.steps} steps of {found.best.tokens // found.best.steps:,} tokens."
        f" {request.usable_bytes / 1e9:.3g} GB of a device may be filled.",
        headings,
        words=len(headings) - 1,
    )
    for row in found.rows[:SHOWN]:
        table.add_row(
            *map(str, row.mesh.shape),
            str(row.mesh.virtual_stages),
            f"{row.recomputed:.0%}",
            f"{row.step_ms:,.1f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.peak_bytes / 1e9:.3g}",
            f"{row.idle:.1%}",
            f"{row.bound_by} ({row.shares[row.bound_by]:.0%})",
        )
    return table


def _figures(
    request: MeshRequest, found: MeshChoice, verdict: Verdict, training: list[str]
) -> dict[str, Any]:
    """The entries of the JSON report about the meshes."""
    references = {BASELINE: verdict.original, REFERENCE: verdict.reference}
    return {
        "devices": request.devices,
        "devices_per_node": request.profile.devices_per_node,
        "packing": request.data.packing_choice.method,
        "digest": request.digest,
        "rows": [row.figures for row in found.rows],
        "left_out": [dict(vars(each)) for each in found.left_out],
        **{name: each and each.row.figures for name, each in references.items()},
        "verdict": verdict.figures | {"trainer": training},
    }
