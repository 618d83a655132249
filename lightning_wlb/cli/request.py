"""What `lightning-wlb plan` was asked for: the arguments, understood and checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_wlb.argument_checks import whole
from lightning_wlb.cli.shared_options import (
    Lengths,
    load_lengths,
    mesh_of,
    model_shape,
    names_of,
    packing_options,
)
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.memory_model import usable_bytes
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.step_chooser import StepChooser
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding import ADAPTIVE, HEADS, NAMES, check_heads

BASELINE = "original"
REFERENCE = "best_fit"
"""What most would do without this package: whole documents, packed by their tokens."""

COMPARED = f"{BASELINE},{REFERENCE},wlb,{DataSettings.packing}"
"""The packings that are compared where none are named."""

STEPS = 100
"""How many are planned where no number is given."""

SHARDING_NAMES = [ADAPTIVE, *NAMES]
PRECISIONS = {
    # name: (compute dtype, dtype at rest)
    "bf16-mixed": ("bfloat16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Request(MeshRequest):
    """Packings that are compared on one mesh: all of its sizes are given.

    Args:
        settings: by packing, those of the baseline among them.
        candidates: packing and sharding of each row, the baseline first.
    """

    settings: Mapping[str, DataSettings]
    candidates: Sequence[tuple[str, str]]

    @staticmethod
    def of(arguments: argparse.Namespace) -> Request:
        """Understand the arguments.

        Raises:
            ValueError: a mistake in them, with the remedy.
        """
        check_counts(arguments)
        mesh = mesh_of(arguments.mesh)
        shape = model_shape(arguments.model)
        if arguments.devices not in (None, mesh.devices):
            raise ValueError(
                f"--mesh {arguments.mesh} has {mesh.devices} devices, not --devices"
                f" {arguments.devices}: leave --devices out, or give --mesh auto."
            )
        shape.check_tensor_parallel(mesh.tensor)
        packings = names_of("--packing", arguments.packing or COMPARED, list(PACKINGS))
        shardings = names_of("--sharding", arguments.sharding, SHARDING_NAMES)
        if HEADS in shardings and mesh.context > 1:
            for layer in shape.kinds:
                check_heads(layer.heads, layer.kv_heads, mesh.context, mesh.tensor)
        options = packing_options(arguments.packing_option, packings)
        micro_batches = arguments.micro_batches or mesh.data * mesh.pipeline
        settings = {
            name: settings_of(arguments, micro_batches, name, options.get(name, {}))
            for name in [BASELINE, REFERENCE, *packings]
        }
        schedule = arguments.schedule or "1f1b"
        virtual = arguments.virtual_stages or (2 if schedule == "interleaved" else 1)
        rows = [
            (BASELINE, shardings[0]),
            (REFERENCE, shardings[0]),
            *((name, each) for each in shardings for name in packings),
        ]
        return Request(
            **run_of(arguments, settings[BASELINE], arguments.steps or STEPS),
            devices=mesh.devices,
            fixed=dict(zip(AXES, mesh.shape, strict=True)),
            schedule=schedule,
            virtual_stages=virtual,
            settings=settings,
            candidates=list(dict.fromkeys(rows)),
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh, with its virtual stages."""
        return Mesh(**self.fixed, virtual_stages=self.virtual_stages or 1)

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that may be filled on this mesh."""
        return usable_bytes(self.profile, self.mesh)

    def predictor(self, mesh: Mesh | None = None) -> Predictor:
        """The predictor on this or another mesh.

        Raises:
            ValueError: a mesh that the model or the schedule cannot run on.
        """
        return super().predictor(mesh or self.mesh)

    def planner(
        self,
        packing: str,
        sharding: str,
        scorer: ProfileScorer,
        step_chooser: StepChooser | None = None,
    ) -> Planner:
        """The planner of the run's steps; ``scorer`` simulates plans on the mesh."""
        return Planner(
            self.lengths,
            self.settings[packing],
            Work.of(self.shape),
            self.mesh,
            sharding=sharding,
            schedule=self.schedule_of(self.mesh),
            kernel_cost=scorer.predictor.latency.segment_cost,
            scorer=scorer,
            activation_checkpointing=self.activation_checkpointing,
            step_chooser=step_chooser,
        )

    def longest_micro_batch(self, predictor: Predictor) -> int:
        """L_max, tokens, if the replicas run equally many micro-batches and all are as long.

        They recompute everything, unless what they recompute is given.
        """
        asked = self.activation_checkpointing
        recompute = "full" if asked == "auto" else asked
        count = -(-self.data.micro_batches // predictor.latency.mesh.data)
        return predictor.longest_micro_batch(count, recompute)


def check_counts(arguments: argparse.Namespace) -> None:
    """Refuse options that are no whole numbers of at least 1.

    Raises:
        ValueError: naming the option.
    """
    for option in ("steps", "micro_batches", "virtual_stages", "devices", "devices_per_node"):
        if (given := getattr(arguments, option)) is not None:
            whole(f"--{option.replace('_', '-')}", given, 1)


def run_of(arguments: argparse.Namespace, data: DataSettings, steps: int) -> dict[str, Any]:
    """What a request takes from the arguments whether its mesh is given or searched for.

    Raises:
        ValueError: a mistake in them, with the remedy.
    """
    profile, rest = profile_of(arguments)
    return {
        "lengths": lengths_of(arguments, data.micro_batches, steps),
        "shape": model_shape(arguments.model),
        "data": data,
        "profile": profile,
        "activation_checkpointing": arguments.activation_checkpointing,
        "rest_dtype": rest,
        "reduce_dtype": arguments.reduce_dtype or "float32",
        "steps": steps,
    }


def profile_of(arguments: argparse.Namespace) -> tuple[Profile, str]:
    """The device's profile with the nodes that were asked for, and the dtype of state at rest.

    Raises:
        ValueError: no such profile, one of another device or dtype, or sums that are narrower.
    """
    profile = Profile.load(arguments.profile)
    compute, rest = PRECISIONS[arguments.precision or _default_precision(profile)]
    profile.check(device_type=arguments.device, dtype=compute)
    reduced = arguments.reduce_dtype
    if reduced is not None and DTYPE_BYTES[reduced] < DTYPE_BYTES[compute]:
        raise ValueError(
            f"--reduce-dtype {reduced} would round what is computed in {compute}. Leave it out, or"
            " give a --precision that computes in bfloat16."
        )
    if arguments.devices_per_node is not None:
        profile = replace(profile, devices_per_node=arguments.devices_per_node)
    return profile, rest


def lengths_of(arguments: argparse.Namespace, micro_batches: int, steps: int) -> Lengths:
    """Tokens of each document.

    Raises:
        ValueError: lengths that cannot be read, or documents above the window.
    """
    lengths = load_lengths(
        arguments.lengths,
        context_window=arguments.context_window,
        micro_batches=micro_batches,
        steps=steps,
        seed=arguments.seed,
    )
    _check_window(lengths, arguments)
    return lengths


def settings_of(
    arguments: argparse.Namespace, micro_batches: int, packing: str, options: Mapping[str, Any]
) -> DataSettings:
    """The data settings with one packing."""
    return DataSettings(
        context_window=arguments.context_window,
        micro_batches=micro_batches,
        packing={"method": packing, **options},
        # A cap above the window means nothing to a packing whose windows are cut before.
        cap=None if PACKINGS[packing].cuts_stream else arguments.cap,
        long_documents=arguments.long_documents,
        seed=arguments.seed,
    )


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
