"""The arguments of `lightning-wlb plan`, parsed and checked: what to plan, or to search for."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from lightning_wlb.argument_checks import choice, flag, whole
from lightning_wlb.cli.shared_options import given_model, load_lengths, sizes_of
from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS

BASELINE = "original"
REFERENCE = "best_fit"
PRACTICE = {BASELINE: "cutting and concatenating", REFERENCE: "whole documents, packed by tokens"}
"""What people do without this package."""

DEFAULT = str(DataSettings.packing)
COMPARED = f"{BASELINE},{REFERENCE},wlb,{DEFAULT}"
"""The packings that are compared if none are named."""

STEPS = 100
"""How many steps are planned on one mesh if no number is given."""

MESH_STEPS = 3
"""How many steps are planned on each mesh of a search if no number is given."""

PRECISIONS = {
    # name: (compute dtype, dtype at rest)
    "bf16-mixed": ("bfloat16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
}


def is_searched(arguments: argparse.Namespace) -> bool:
    """Whether ``--mesh`` leaves a size open."""
    return len(sizes_of(arguments.mesh)) < len(AXES)


def requests_of(arguments: argparse.Namespace) -> list[MeshRequest]:
    """The requests to plan, or to search meshes for: baseline, reference, the packing asked for."""
    fixed, model = sizes_of(arguments.mesh), given_model(arguments.model)
    if model.foreign is not None:
        from lightning_wlb.models.huggingface.config_and_shape import positions_warning

        told = positions_warning(model.foreign, arguments.context_window)
        if told is not None:
            print(f"Warning: {told}", file=sys.stderr)
    if model.settings.get("lora") is not None:
        told = "all parameters are taken to be trained. With lora a step takes less time and memory"
        print(f"Warning: {told} than is predicted.", file=sys.stderr)
    devices, micro_batches = arguments.devices, arguments.micro_batches
    schedule, virtual_stages = arguments.schedule, arguments.virtual_stages
    if searched := is_searched(arguments):
        check_search(arguments)
        steps, packing = MESH_STEPS, DEFAULT
    else:
        mesh = Mesh(**fixed)
        if devices not in (None, mesh.devices):
            raise ValueError(
                f"--mesh {arguments.mesh} has {mesh.devices} devices, not --devices {devices}:"
                " leave --devices out, or give --mesh auto."
            )
        model.shape.check_tensor_parallel(mesh.tensor, mesh.context)
        devices, schedule = mesh.devices, schedule or "1f1b"
        if micro_batches is None:
            micro_batches = mesh.data * mesh.pipeline
        if virtual_stages is None:
            virtual_stages = 2 if schedule == "interleaved" else 1
        steps, packing = STEPS, COMPARED
    steps = whole("--steps", steps if arguments.steps is None else arguments.steps, 1)
    given = (packing if arguments.packing is None else arguments.packing).split(",")
    packings = [choice("--packing", name, PACKINGS) for name in given]
    if searched and len(packings) > 1:
        raise ValueError(
            f"--packing {','.join(packings)}: a mesh is searched for one at a time. Give one, or"
            " the sizes of a mesh to compare several on it."
        )
    settings = {
        name: DataSettings(
            context_window=arguments.context_window,
            micro_batches=micro_batches,
            packing=name,
            # A packing that cuts the stream into windows has no use for a cap.
            cap=None if PACKINGS[name].cuts_stream else arguments.cap,
            long_documents=arguments.long_documents,
            seed=arguments.seed,
        )
        for name in [BASELINE, REFERENCE, *packings]
    }
    profile, rest = profile_of(arguments)
    # All CPU ranks are taken to be on one machine.
    per_node = devices if profile.device_type == "cpu" else None
    if arguments.devices_per_node is not None:
        per_node = whole("--devices-per-node", arguments.devices_per_node, 1)
    baseline = MeshRequest(
        lengths=load_lengths(
            arguments.lengths,
            context_window=arguments.context_window,
            micro_batches=micro_batches,
            steps=steps,
            seed=arguments.seed,
            vocab_size=model.shape.vocab_size,
        ),
        shape=model.shape,
        data=settings[BASELINE],
        profile=profile,
        devices=devices,
        devices_per_node=per_node,
        fixed=fixed,
        schedule=schedule,
        virtual_stages=virtual_stages,
        activation_checkpointing=arguments.activation_checkpointing
        or model.settings.get("activation_checkpointing", "auto"),
        rest_dtype=rest,
        reduce_dtype=arguments.reduce_dtype or "float32",
        compiled=arguments.compile or flag("compile", model.settings.get("compile", False)),
        overlap="late" if model.foreign else "all",
        sharding=arguments.sharding,
        steps=steps,
    )
    return [replace(baseline, data=each) for each in settings.values()]


def check_search(arguments: argparse.Namespace) -> None:
    """Refuse a search without options that it needs, or with options that it cannot follow."""
    for option, why in (
        ("devices", "it says how many the mesh has"),
        ("micro_batches", "it says how many tokens a step has, on every mesh"),
    ):
        if getattr(arguments, option) is None:
            raise ValueError(f"--mesh {arguments.mesh} needs --{option.replace('_', '-')}: {why}.")
    for option in ("picture", "write"):
        if getattr(arguments, option) is not None:
            raise ValueError(
                f"--{option} shows one mesh: give --mesh the sizes that this search finds."
            )


def profile_of(arguments: argparse.Namespace) -> tuple[Profile, str]:
    """The device's profile, and the dtype of parameters and optimizer state."""
    profile = Profile.load(arguments.profile)
    by_dtype = {computed: name for name, (computed, _) in reversed(PRECISIONS.items())}
    compute, rest = PRECISIONS[arguments.precision or by_dtype.get(profile.dtype, "bf16-mixed")]
    profile.check(dtype=compute)
    reduced = arguments.reduce_dtype
    if reduced is not None and DTYPE_BYTES[reduced] < DTYPE_BYTES[compute]:
        raise ValueError(
            f"--reduce-dtype {reduced} would round what is computed in {compute}. Leave it out, or"
            " give a --precision that computes in bfloat16."
        )
    return profile, rest
