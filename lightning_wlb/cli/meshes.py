"""`lightning-wlb plan --mesh auto`: which mesh to take, and what balancing gains there.

The search is :func:`~lightning_wlb.mesh_search.search.choose_mesh`, with the packing asked for,
with ``original`` and with ``best_fit``, so that the verdict compares each on its own best mesh.
Everything is simulated from the device profile. Each row that is printed comes out the same when
its mesh is given.

Cost: seconds for 16 devices, a minute or two for 1,024.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_wlb.cli.forecast import Speed, Verdict
from lightning_wlb.cli.request import BASELINE, PRECISIONS, REFERENCE
from lightning_wlb.cli.shared_options import given_model, report_head
from lightning_wlb.mesh import AXES
from lightning_wlb.mesh_search.evaluate import MeshChoice, MeshRow
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import Progress, choose_mesh, progress_bar
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.sharding import ADAPTIVE

SHOWN = 5
"""Meshes in the table."""


@dataclass(frozen=True)
class Searched:
    """A search and its verdict, each packing on its own best mesh.

    Args:
        request: what was searched for.
        found: the answer.
        others: the best mesh of ``original`` and of ``best_fit``; None where they fit on none.
    """

    request: MeshRequest
    found: MeshChoice
    others: Mapping[str, MeshRow | None]

    @cached_property
    def verdict(self) -> Verdict:
        """Whether balancing pays, in words."""
        request = self.request

        def speed(packing: str, row: MeshRow | None) -> Speed | None:
            return None if row is None else Speed(packing, request.sharding, row)

        chosen = speed(request.data.packing_choice.method, self.found.best)
        assert chosen is not None
        original, reference = (speed(name, self.others[name]) for name in (BASELINE, REFERENCE))
        return Verdict(request, chosen, original, reference, searched=True)

    @property
    def advised(self) -> MeshRow:
        """The mesh to take."""
        if self.verdict.worth_it:
            return self.found.best
        return self.others[REFERENCE] or self.found.best


def run_search(
    arguments: argparse.Namespace, requests: Sequence[MeshRequest], console: Console
) -> None:
    """Search, print, and write what was asked for.

    Args:
        arguments: the command's.
        requests: for the baseline, the reference and the packing that is asked for.
        console: to print to.

    Raises:
        ValueError: no mesh on which the model fits; the message says what would do.
    """
    by_packing = {each.data.packing_choice.method: each for each in requests}
    request = by_packing[arguments.packing or str(DataSettings.packing)]
    with progress_bar() as tell:
        found = choose_mesh(request, progress=tell)
        others = {name: _best_of(by_packing[name], tell) for name in (BASELINE, REFERENCE)}
    searched = Searched(request, found, others)
    console.print(_table(searched))
    for each in found.left_out:
        console.print(
            f"Left out, {each.count}: {each.reason} (as {each.example}).", highlight=False
        )
    for line in searched.verdict.lines:
        console.print(line, highlight=False)
    console.print("\nNext, to train so:", highlight=False)
    for line in trainer_lines(arguments, searched):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if arguments.json:
        print(json.dumps(_report(arguments, searched)))


def _best_of(request: MeshRequest, tell: Progress) -> MeshRow | None:
    """The best mesh of a packing, if it fits on any."""
    try:
        return choose_mesh(request, progress=tell).best
    except ValueError:
        return None


def trainer_lines(arguments: argparse.Namespace, searched: Searched) -> list[str]:
    """What makes a run of it: a command where the model is in a YAML, or else Python to paste."""
    model, sections = given_model(arguments.model), _sections(arguments, searched)
    if model.file:
        data = arguments.lengths if Path(arguments.lengths).exists() else "DOCUMENTS"
        sections["model"] |= {f"config.{name}": value for name, value in model.changes.items()}
        lines = [f"lightning-wlb fit --config {shlex.quote(model.file)} --trainer.strategy wlb"]
        for section, given in sections.items():
            words = (f"--{section}.{name} {_word(value)}" for name, value in given.items())
            lines.append(" ".join(words))
        return [" \\\n    ".join([*lines, f"--data.documents {shlex.quote(data)}"])]
    python = {
        section: ", ".join(f"{name}={value!r}" for name, value in given.items())
        for section, given in sections.items()
    }
    module = "LanguageModule(..."
    if model.hugging_face:
        module = f"HuggingFaceModule({arguments.model!r}, pretrained=..."
    return [
        f"Trainer({python['trainer']}, strategy=WLBStrategy({python['wlb']}))",
        f"{module}, {python['model']})",
        f"WLBDataModule(..., {python['data']})",
    ]


def _sections(arguments: argparse.Namespace, searched: Searched) -> dict[str, dict[str, Any]]:
    """The arguments of Trainer, strategy, module and data module."""
    row, request, verdict = searched.advised, searched.request, searched.verdict
    profile, data, method = request.profile, request.data, verdict.advised.packing
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
    if arguments.overlap == "off":
        wlb["overlap"] = "off"
    if row.mesh.virtual_stages > 1 or row.schedule == "interleaved":  # which has 2 by default
        wlb["virtual_pipeline_size"] = row.mesh.virtual_stages
    module = {"activation_checkpointing": row.activation_checkpointing}
    packing: Any = method
    options = asdict(data.packing_choice.options)
    if verdict.worth_it and options != asdict(data.packer.Options()):
        packing = {"method": packing, **options}
    others = {
        "sharding": None if request.sharding == ADAPTIVE else request.sharding,
        "cap": None if PACKINGS[method].cuts_stream else arguments.cap,
        "long_documents": None if data.long_documents == "split" else data.long_documents,
        "seed": data.seed or None,
    }
    given = {
        "context_window": data.context_window,
        "micro_batches": data.micro_batches,
        "packing": packing,
        **{name: value for name, value in others.items() if value is not None},
        "profile": arguments.profile,
    }
    compiled = {"compile": True} if request.compiled else {}
    return {"trainer": trainer, "wlb": wlb, "model": module | compiled, "data": given}


def _word(value: Any) -> str:
    """A value as a word of a shell's command."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def _table(searched: Searched) -> Table:
    request, found = searched.request, searched.found
    shape = request.shape
    table = Table(
        title=f"Simulated: dim {shape.dim}, {shape.layers} layers, {shape.heads} heads"
        f" ({shape.kv_heads} key/value), vocabulary {shape.vocab_size} on {request.devices}"
        f" devices, {request.profile.devices_per_node} to a node; packing"
        f" {request.data.packing_choice.method}",
        caption=f"{request.profile.provenance}.\n{len(request.lengths):,} documents,"
        f" {request.steps} steps of {found.best.tokens // found.best.steps:,} tokens."
        f" {request.usable_bytes / 1e9:.3g} GB of a device may be filled.",
        title_justify="left",
        caption_justify="left",
    )
    for heading in (
        *AXES,
        "virtual\nstages",
        "recom-\nputed",
        "step\n(ms)",
        "tokens/s",
        "memory\n(GB)",
        "idle",
    ):
        table.add_column(heading, justify="right")
    table.add_column("beside arithmetic, most time goes to")
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


def _report(arguments: argparse.Namespace, searched: Searched) -> dict[str, Any]:
    request, found = searched.request, searched.found
    profile = request.profile

    return report_head(arguments, profile, request.lengths) | {
        "devices": request.devices,
        "devices_per_node": profile.devices_per_node,
        "context_window": request.data.context_window,
        "micro_batches": request.data.micro_batches,
        "packing": request.data.packing_choice.method,
        "steps": request.steps,
        "digest": found.digest,
        "rows": [row.figures for row in found.rows],
        "left_out": [dict(vars(each)) for each in found.left_out],
        **{name: row and row.figures for name, row in searched.others.items()},
        "verdict": searched.verdict.figures
        | {
            "mesh": searched.advised.sizes,
            "trainer": trainer_lines(arguments, searched),
        },
    }
