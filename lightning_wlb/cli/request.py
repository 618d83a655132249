"""What `lightning-wlb plan` was asked for: the arguments, understood and checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_wlb.argument_checks import whole
from lightning_wlb.cli.shared_options import (
    GivenModel,
    given_model,
    load_lengths,
    names_of,
    packing_options,
    sizes_of,
)
from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS

BASELINE = "original"
REFERENCE = "best_fit"
PRACTICE = {BASELINE: "cutting and concatenating", REFERENCE: "whole documents, packed by tokens"}
"""What people do without this package."""

COMPARED = f"{BASELINE},{REFERENCE},wlb,{DataSettings.packing}"
"""The packings that are compared where none are named."""

STEPS = 100
"""How many are planned on one mesh where no number is given."""

MESH_STEPS = 3
"""How many are planned on each mesh of a search where no number is given."""

SHARDING_NAMES = [ADAPTIVE, *SHARDINGS]
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
    """What is planned, or what meshes are searched for: the baseline, the reference, what is asked.

    Raises:
        ValueError: a mistake in the arguments, with the remedy.
    """
    check_counts(arguments)
    fixed = sizes_of(arguments.mesh)
    model = given_model(arguments.model)
    if searched := is_searched(arguments):
        check_search(arguments)
        devices, micro_batches = arguments.devices, arguments.micro_batches
        schedule, virtual_stages = arguments.schedule, arguments.virtual_stages
    else:
        mesh = Mesh(**fixed)
        if arguments.devices not in (None, mesh.devices):
            raise ValueError(
                f"--mesh {arguments.mesh} has {mesh.devices} devices, not --devices"
                f" {arguments.devices}: leave --devices out, or give --mesh auto."
            )
        model.shape.check_tensor_parallel(mesh.tensor, mesh.context)
        devices, schedule = mesh.devices, arguments.schedule or "1f1b"
        micro_batches = arguments.micro_batches or mesh.data * mesh.pipeline
        virtual_stages = arguments.virtual_stages or (2 if schedule == "interleaved" else 1)
    usual = str(DataSettings.packing) if searched else COMPARED
    packings = names_of("--packing", arguments.packing or usual, list(PACKINGS))
    shardings = names_of("--sharding", arguments.sharding, SHARDING_NAMES)
    for option, names in (("--packing", packings), ("--sharding", shardings)):
        if searched and len(names) > 1:
            raise ValueError(
                f"{option} {','.join(names)}: a mesh is searched for one at a time. Give one, or"
                " the sizes of a mesh to compare several on it."
            )
    options = packing_options(arguments.packing_option, packings)
    settings = {
        name: settings_of(arguments, micro_batches, name, options.get(name, {}))
        for name in [BASELINE, REFERENCE, *packings]
    }
    steps = arguments.steps or (MESH_STEPS if searched else STEPS)
    baseline = MeshRequest(
        **run_of(arguments, model, settings[BASELINE], steps),
        devices=devices,
        fixed=fixed,
        schedule=schedule,
        virtual_stages=virtual_stages,
    )
    rows = [(name, shardings[0]) for name in (BASELINE, REFERENCE)]
    rows += [(name, each) for each in shardings for name in packings]
    return [
        replace(baseline, data=settings[packing], sharding=sharding)
        for packing, sharding in dict.fromkeys(rows)
    ]


def check_search(arguments: argparse.Namespace) -> None:
    """Refuse what a search lacks, or cannot show.

    Raises:
        ValueError: naming the option.
    """
    for option, why in (
        ("devices", "it says how many the mesh has"),
        ("micro_batches", "it says how many tokens a step has, on every mesh"),
    ):
        if getattr(arguments, option) is None:
            raise ValueError(f"--mesh {arguments.mesh} needs --{option.replace('_', '-')}: {why}.")
    for option in ("picture", "trace", "write"):
        if getattr(arguments, option) is not None:
            raise ValueError(
                f"--{option} shows one mesh: give --mesh the sizes that this search finds."
            )


def check_counts(arguments: argparse.Namespace) -> None:
    """Refuse options that are no whole numbers of at least 1.

    Raises:
        ValueError: naming the option.
    """
    for option in ("steps", "micro_batches", "virtual_stages", "devices", "devices_per_node"):
        if (given := getattr(arguments, option)) is not None:
            whole(f"--{option.replace('_', '-')}", given, 1)


def run_of(
    arguments: argparse.Namespace, model: GivenModel, data: DataSettings, steps: int
) -> dict[str, Any]:
    """What a request takes from the arguments whether its mesh is given or searched for.

    Raises:
        ValueError: a mistake in them, with the remedy.
    """
    profile, rest = profile_of(arguments)
    settings = model.settings
    return {
        "lengths": load_lengths(
            arguments.lengths,
            context_window=arguments.context_window,
            micro_batches=data.micro_batches,
            steps=steps,
            seed=arguments.seed,
            vocab_size=model.shape.vocab_size,
        ),
        "shape": model.shape,
        "data": data,
        "profile": profile,
        "activation_checkpointing": arguments.activation_checkpointing
        or settings.get("activation_checkpointing", "auto"),
        "rest_dtype": rest,
        "reduce_dtype": arguments.reduce_dtype or "float32",
        "compiled": arguments.compile or bool(settings.get("compile")),
        "overlap": arguments.overlap == "auto" and not model.hugging_face,
        "steps": steps,
    }


def profile_of(arguments: argparse.Namespace) -> tuple[Profile, str]:
    """The device's profile with the nodes that were asked for, and the dtype of state at rest.

    Raises:
        ValueError: no such profile, one of another device or dtype, or sums that are narrower.
    """
    profile = Profile.load(arguments.profile)
    compute, rest = PRECISIONS[arguments.precision or _default_precision(profile)]
    profile.check(dtype=compute)
    reduced = arguments.reduce_dtype
    if reduced is not None and DTYPE_BYTES[reduced] < DTYPE_BYTES[compute]:
        raise ValueError(
            f"--reduce-dtype {reduced} would round what is computed in {compute}. Leave it out, or"
            " give a --precision that computes in bfloat16."
        )
    # All ranks on processors are taken to be of one machine.
    machine = arguments.devices if profile.device_type == "cpu" else None
    if per_node := arguments.devices_per_node or machine:
        profile = replace(profile, devices_per_node=per_node)
    return profile, rest


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
