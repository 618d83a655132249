"""What `lightning-wlb plan` was asked for: understood, checked, and carried out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lightning_wlb.arguments import whole
from lightning_wlb.cli.arguments import mesh_of, model_config, names_of, packing_options
from lightning_wlb.cli.forecast import Forecast, plan_steps
from lightning_wlb.cli.lengths import Lengths, load_lengths
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import Checkpointing, LatencyModel
from lightning_wlb.cost.memory import USABLE_PERCENT
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig, check_tensor_parallel
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.judge import PredictedJudge
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages
from lightning_wlb.sharding import ADAPTIVE, HEADS, NAMES, check_heads

BASELINE = "original"
SHARDING_NAMES = [ADAPTIVE, *NAMES]
PRECISIONS = {
    # name: (compute dtype, dtype at rest)
    "bf16-mixed": ("bfloat16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
}


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments, understood and checked."""

    lengths: Lengths
    config: TransformerConfig
    mesh: Mesh
    profile: Profile
    rest_dtype: str
    schedule: str
    steps: int
    candidates: tuple[tuple[str, str], ...]
    settings: Callable[[str], DataSettings]

    @staticmethod
    def of(arguments: argparse.Namespace) -> Request:
        """Understand the arguments; sets their ``micro_batches`` where it was left out.

        Raises:
            ValueError: a mistake in them, with the remedy.
        """
        mesh = mesh_of(arguments.mesh)
        config = model_config(arguments.model)
        profile = Profile.load(arguments.profile)
        precision = arguments.precision or _default_precision(profile)
        compute, rest = PRECISIONS[precision]
        profile.check(device_type=arguments.device, dtype=compute)
        check_tensor_parallel(config, mesh.tensor)
        for option in ("steps", "micro_batches", "virtual_stages"):
            given = getattr(arguments, option)
            if given is not None:
                whole(f"--{option.replace('_', '-')}", given, 1)
        count = arguments.micro_batches or mesh.data * mesh.pipeline
        arguments.micro_batches = count
        packings = names_of("--packing", arguments.packing, list(PACKINGS))
        shardings = names_of("--sharding", arguments.sharding, SHARDING_NAMES)
        if HEADS in shardings and mesh.context > 1:
            check_heads(config.heads, config.kv_heads, mesh.context, mesh.tensor)
        options = packing_options(arguments.packing_option, packings)
        candidates = [(name, sharding) for sharding in shardings for name in packings]
        baseline = (BASELINE, shardings[0])

        def settings(packing: str) -> DataSettings:
            # A cap above the window means nothing to a packing whose windows are cut before.
            cap = None if PACKINGS[packing].cuts_stream else arguments.cap
            return DataSettings(
                context_window=arguments.context_window,
                micro_batches=count,
                packing={"method": packing, **options.get(packing, {})},
                cap=cap,
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
        return Request(
            lengths=lengths,
            config=config,
            mesh=replace(mesh, virtual_stages=virtual),
            profile=profile,
            rest_dtype=rest,
            schedule=arguments.schedule,
            steps=arguments.steps,
            candidates=(baseline, *(each for each in candidates if each != baseline)),
            settings=settings,
        )

    def predictor(self, mode: Checkpointing, mesh: Mesh | None = None) -> Predictor:
        """The predictor with one kind of activation checkpointing, on this or another mesh."""
        mesh = mesh or self.mesh
        window = self.settings(BASELINE).context_window
        context = mean_context_of(self.lengths, window)
        return Predictor(
            LatencyModel(self.profile, self.config.shape, mesh, mode),
            tuple(model_stages(self.config.shape, mesh.stages, context)),
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
        judge = PredictedJudge(self.predictor(modes[0]))
        planned = {
            (packing, sharding): plan_steps(
                Planner(
                    self.lengths,
                    self.settings(packing),
                    Work.of(self.config.shape),
                    self.mesh,
                    sharding=sharding,
                    schedule=self.schedule,
                    kernel_cost=judge.predictor.latency.segment_cost,
                    judge=judge,
                ),
                self.steps,
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
        tokens = self.longest_micro_batch(predictor)
        raise ValueError(
            f"The activations do not fit on the mesh {self.mesh}: with activation checkpointing"
            f" {modes[-1]!r}, packing {least.packing!r} with sharding {least.sharding!r} would fill"
            f" {least.peak_bytes / 1e9:.1f} GB of a device, of which {self.usable_bytes / 1e9:.1f}"
            f" GB ({USABLE_PERCENT} % of {self.profile.device}) may be filled. Micro-batches of up"
            f" to {tokens} tokens would fit here, all as long"
            f"{'' if asked == 'auto' else '; or --activation-checkpointing auto may'}."
            f" {self._what_fits()}"
        )

    def longest_micro_batch(self, predictor: Predictor) -> int:
        """L_max if the global batch's micro-batches are dealt evenly and all as long."""
        count = self.settings(BASELINE).micro_batches
        return predictor.longest_micro_batch(-(-count // predictor.latency.mesh.data))

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
                    mesh = replace(
                        self.mesh,
                        pipeline=self.mesh.pipeline << pipeline,
                        context=self.mesh.context << context,
                        tensor=self.mesh.tensor << (factor - pipeline - context),
                    )
                    if self._fits(mesh, cap):
                        found.append(",".join(map(str, mesh.shape)))
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
        return self.longest_micro_batch(predictor) >= cap


def _default_precision(profile: Profile) -> str:
    for name, (compute, _) in PRECISIONS.items():
        if compute == profile.dtype:
            return name
    raise ValueError(f"no precision computes in {profile.dtype!r}, the dtype of {profile.name!r}.")


def _check_window(lengths: Lengths, arguments: argparse.Namespace) -> None:
    window = arguments.context_window
    above = int((lengths > window).sum())
    if above and arguments.long_documents == "error":
        raise ValueError(
            f"{above} of {len(lengths)} documents are longer than --context-window {window}; the"
            f" longest has {int(lengths.max())} tokens. Give --context-window {int(lengths.max())}"
            " for all to fit, or --long-documents split (pieces of a window) or truncate."
        )
