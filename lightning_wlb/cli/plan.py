r"""Compare packings on your documents' lengths, before a device is rented.

Plans steps for a model on a mesh, predicts what each takes on a device, and prints a table with
every packing against `original`: imbalance at each level, delay, step time, tokens per second,
model FLOP utilisation, memory peak, speed-up. Everything is simulated from a device profile; the
report says whether that was measured or put together from published figures.

  lightning-wlb plan --lengths generator-a --model 7b --mesh 1,4,2,8 \
      --context-window 131072 --profile h100 --packing original,wlb
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_wlb.attention.sharding import ADAPTIVE, SHARDINGS
from lightning_wlb.cli.forecast import Forecast, plan_steps
from lightning_wlb.cli.lengths import GENERATOR_A, STORES, Lengths, load_lengths
from lightning_wlb.cost.communication import Mesh
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import Checkpointing, LatencyModel
from lightning_wlb.cost.memory import USABLE_PERCENT
from lightning_wlb.cost.profile import Profile, shipped_profiles
from lightning_wlb.models.config import TransformerConfig, check_tensor_parallel, preset_names
from lightning_wlb.planning import DataSettings, MeshSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.predict import Predictor, mean_context_of, model_stages
from lightning_wlb.planning.settings import LongDocuments
from lightning_wlb.schedule.registry import SCHEDULES
from lightning_wlb.schedule.simulate import Simulation
from lightning_wlb.schedule.trace import draw_gantt, write_trace

BASELINE = "original"
SHARDING_NAMES = [ADAPTIVE, *SHARDINGS]
PRECISIONS = {
    # name: (compute dtype, dtype at rest)
    "bf16-mixed": ("bfloat16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
}


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
    run.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(preset_names())}; or sizes, as in dim=4096,layers=32,heads=32,kv_heads=8,"
        "ffn_dim=14336,vocab_size=128256; or a preset and sizes that replace its own",
    )
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
        default=",".join(PACKINGS),
        help=f"one or several of {', '.join(PACKINGS)} (default: all)",
    )
    how.add_argument("--cap", type=int, help="tokens of a micro-batch (default: the packing's)")
    how.add_argument("--queues", type=int, default=2, help="outlier queues of wlb (default 2)")
    how.add_argument(
        "--sharding",
        default=MeshSettings.sharding,
        help=f"one or several of {', '.join(SHARDING_NAMES)} (default {MeshSettings.sharding})",
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
    request = _Request.of(arguments)
    mode, forecasts, others = request.forecasts(arguments.activation_checkpointing)
    baseline = forecasts[0]
    rows = [forecast.summary(baseline) for forecast in forecasts]
    predictor = request.predictor(mode)
    longest = predictor.longest_micro_batch(arguments.micro_batches_of_replica)
    _show(console, request, mode, longest, rows)
    too_large = [
        {
            "packing": each.packing,
            "sharding": each.sharding,
            "peak_gigabytes": each.peak_bytes / 1e9,
        }
        for each in others
    ]
    for each in too_large:
        console.print(
            "Does not fit in memory: {packing}, {sharding}, which would fill"
            " {peak_gigabytes:.1f} GB.".format(**each),
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


@dataclass(frozen=True, eq=False)
class _Request:
    """The arguments, understood and checked."""

    lengths: Lengths
    config: TransformerConfig
    mesh: Mesh
    profile: Profile
    rest_dtype: str
    stages: int
    schedule: str
    steps: int
    candidates: tuple[tuple[str, str], ...]
    settings: Callable[[str], DataSettings]

    @staticmethod
    def of(arguments: argparse.Namespace) -> _Request:
        mesh = _mesh(arguments.mesh)
        config = _model(arguments.model)
        profile = Profile.load(arguments.profile)
        precision = arguments.precision or _default_precision(profile)
        compute, rest = PRECISIONS[precision]
        profile.check(device_type=arguments.device, dtype=compute)
        check_tensor_parallel(config, mesh.tensor)
        if arguments.steps < 1:
            raise ValueError(f"--steps {arguments.steps}: plan at least 1 step.")
        count = arguments.micro_batches or mesh.data * mesh.pipeline
        arguments.micro_batches = count
        arguments.micro_batches_of_replica = -(-count // mesh.data)
        packings = _names("--packing", arguments.packing, list(PACKINGS))
        shardings = _names("--sharding", arguments.sharding, SHARDING_NAMES)
        candidates = [(name, sharding) for sharding in shardings for name in packings]
        baseline = (BASELINE, shardings[0])

        def settings(packing: str) -> DataSettings:
            # A cap above the window means nothing to a packing whose windows are cut before.
            cap = None if PACKINGS[packing].cuts_stream else arguments.cap
            return DataSettings(
                context_window=arguments.context_window,
                micro_batches=count,
                packing=packing,
                cap=cap,
                queues=arguments.queues,
                long_documents=arguments.long_documents,
                seed=arguments.seed,
            )

        settings(BASELINE)  # a wrong window is answered before lengths are made from it
        lengths = load_lengths(
            arguments.lengths,
            context_window=arguments.context_window,
            micro_batches=count,
            steps=arguments.steps,
            seed=arguments.seed,
        )
        _check_window(lengths, arguments)
        virtual = arguments.virtual_stages or (2 if arguments.schedule == "interleaved" else 1)
        return _Request(
            lengths=lengths,
            config=config,
            mesh=mesh,
            profile=profile,
            rest_dtype=rest,
            stages=virtual * mesh.pipeline,
            schedule=arguments.schedule,
            steps=arguments.steps,
            candidates=(baseline, *(each for each in candidates if each != baseline)),
            settings=settings,
        )

    def predictor(self, mode: Checkpointing, mesh: Mesh | None = None) -> Predictor:
        """The predictor with one kind of activation checkpointing, on this or another mesh."""
        mesh = mesh or self.mesh
        window = self.settings(BASELINE).context_window
        stages = self.stages // self.mesh.pipeline * mesh.pipeline
        return Predictor(
            LatencyModel(self.profile, self.config.shape, mesh, mode),
            tuple(model_stages(self.config.shape, stages, mean_context_of(self.lengths, window))),
            self.schedule,
            self.rest_dtype,
        )

    def forecasts(self, asked: str) -> tuple[Checkpointing, list[Forecast], list[Forecast]]:
        """The activation checkpointing, the predictions that fit in memory, and those that do not.

        Of ``"auto"`` the least checkpointing with which all fit that fit with any; the baseline
        is the first that fits.

        Raises:
            ValueError: nothing fits; with what would.
        """
        modes: Sequence[Checkpointing] = (
            get_args(Checkpointing) if asked == "auto" else [asked]  # type: ignore[list-item]
        )
        self._check_state(modes[-1])
        cost = self.predictor(modes[0]).latency.segment_cost
        planned = {
            (packing, sharding): plan_steps(
                self.lengths,
                self.settings(packing),
                Work(self.config.shape),
                MeshSettings(self.mesh.data, self.mesh.context, self.mesh.tensor, sharding),
                self.steps,
                cost,
            )
            for packing, sharding in self.candidates
        }
        fitting: list[Forecast] = []
        others: list[Forecast] = []
        best = modes[0]
        for mode in modes:
            predictor = self.predictor(mode)
            made = [Forecast.of(*key, plans, predictor) for key, plans in planned.items()]
            fit = [forecast for forecast in made if forecast.peak_bytes <= self.usable_bytes]
            if len(fit) > len(fitting) or mode == modes[0]:
                best, fitting = mode, fit
                others = [forecast for forecast in made if forecast not in fit]
            if not others:
                break
        if fitting:
            return best, fitting, others
        least = min(made, key=lambda forecast: forecast.peak_bytes)
        tokens = predictor.longest_micro_batch(
            max(len(replica.forward) for replica in least.typical_step.plan.replicas)
        )
        raise ValueError(
            f"The activations do not fit on the mesh {self.mesh}: with activation checkpointing"
            f" {modes[-1]!r}, packing {least.packing!r} with sharding {least.sharding!r} would fill"
            f" {least.peak_bytes / 1e9:.1f} GB of a device, of which {self.usable_bytes / 1e9:.1f}"
            f" GB ({USABLE_PERCENT} % of {self.profile.device}) may be filled. Micro-batches of up"
            f" to {tokens} tokens would fit here, all as long"
            f"{'' if asked == 'auto' else '; or --activation-checkpointing auto may'}."
            f" {self._what_fits()}"
        )

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that may be filled."""
        return self.profile.memory_bytes * USABLE_PERCENT // 100

    def _check_state(self, mode: Checkpointing) -> None:
        state = max(self.predictor(mode).state_bytes)
        if state > self.usable_bytes:
            raise ValueError(
                f"The model does not fit on the mesh {self.mesh}: parameters, gradients and"
                f" optimizer state take {state / 1e9:.1f} GB of a device, and"
                f" {self.usable_bytes / 1e9:.1f} GB ({USABLE_PERCENT} % of {self.profile.device})"
                f" may be filled. {self._what_fits()}"
            )

    def _what_fits(self) -> str:
        """Larger meshes on which the largest cap fits, if everything is checkpointed."""
        cap = max(self.settings(packing).token_cap for packing, _ in self.candidates)
        found = []
        for factor in range(1, 9):
            for pipeline in range(factor + 1):
                for context in range(factor + 1 - pipeline):
                    mesh = Mesh(
                        self.mesh.data,
                        self.mesh.pipeline << pipeline,
                        self.mesh.context << context,
                        self.mesh.tensor << (factor - pipeline - context),
                    )
                    if self._fits(mesh, cap):
                        found.append(f"{mesh.data},{mesh.pipeline},{mesh.context},{mesh.tensor}")
            if found:
                return (
                    f"With full activation checkpointing, meshes of {mesh.devices} devices that"
                    f" hold micro-batches of {cap} tokens: --mesh {' or '.join(found[:3])}."
                )
        return "No mesh of up to 256 times as many devices would hold it: use a smaller model."

    def _fits(self, mesh: Mesh, cap: int) -> bool:
        try:
            check_tensor_parallel(self.config, mesh.tensor)
            predictor = self.predictor("full", mesh)
        except ValueError:
            return False
        count = self.settings(BASELINE).micro_batches
        return predictor.longest_micro_batch(-(-count // mesh.data)) >= cap


def _mesh(text: str) -> Mesh:
    try:
        sizes = [int(word) for word in text.split(",")]
        data, pipeline, context, tensor = sizes
    except ValueError as error:
        raise ValueError(
            f"--mesh {text!r} is not data,pipeline,context,tensor: four whole numbers, as in"
            " 1,4,2,8."
        ) from error
    return Mesh(data, pipeline, context, tensor)


def _model(text: str) -> TransformerConfig:
    """``7b``, ``dim=64,layers=4,...``, or ``7b,layers=16``."""
    first, *rest = text.split(",")
    sizes = [first, *rest] if "=" in first else rest
    overrides: dict[str, Any] = {}
    for word in sizes:
        name, _, value = word.partition("=")
        try:
            overrides[name] = int(value)
        except ValueError as error:
            raise ValueError(
                f"--model {text!r}: {word!r} is not a size; write name=number, as in layers=32."
            ) from error
    if "=" in first:
        missing = {"dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size"} - set(overrides)
        if missing:
            raise ValueError(
                f"--model {text!r} leaves out {', '.join(sorted(missing))}. Give all sizes, or"
                f" begin with a preset: {', '.join(preset_names())}."
            )
        return TransformerConfig.preset("tiny", **overrides)
    return TransformerConfig.preset(first, **overrides)


def _default_precision(profile: Profile) -> str:
    for name, (compute, _) in PRECISIONS.items():
        if compute == profile.dtype:
            return name
    raise ValueError(f"no precision computes in {profile.dtype!r}, the dtype of {profile.name!r}.")


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name!r} is not known; choose of {', '.join(known)}.")
    return list(dict.fromkeys(names))


def _check_window(lengths: Lengths, arguments: argparse.Namespace) -> None:
    window = arguments.context_window
    above = int((lengths > window).sum())
    if above and arguments.long_documents == "error":
        raise ValueError(
            f"{above} of {len(lengths)} documents are longer than --context-window {window}; the"
            f" longest has {int(lengths.max())} tokens. Give --context-window {int(lengths.max())}"
            " for all to fit, or --long-documents split (pieces of a window) or truncate."
        )


def _slowest_replica(simulations: Sequence[Simulation]) -> Simulation:
    def end(simulation: Simulation) -> int:
        return max((span.end_ns for rank in simulation.spans for span in rank), default=0)

    return max(simulations, key=end)


def _show(
    console: Console,
    request: _Request,
    mode: str,
    longest: int,
    rows: Sequence[dict[str, Any]],
) -> None:
    table = Table(
        title=f"Simulated: {_shape(request.config)} on {request.mesh}"
        f" ({request.mesh.devices} devices), {request.schedule}",
        caption=(
            f"{request.profile.provenance}.\n"
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


def _shape(config: TransformerConfig) -> str:
    return (
        f"dim {config.dim}, {config.layers} layers, {config.heads} heads"
        f" ({config.kv_heads} key/value), vocabulary {config.vocab_size}"
    )


def _report(
    arguments: argparse.Namespace,
    request: _Request,
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
        "virtual_stages": request.stages // request.mesh.pipeline,
        "activation_checkpointing": mode,
        "longest_micro_batch": longest,
        "seed": arguments.seed,
        "rows": list(rows),
    }
