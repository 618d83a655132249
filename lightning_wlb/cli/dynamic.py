"""What `lightning-wlb plan --dynamic auto` adds: whether steps should leave the mesh."""

from __future__ import annotations

from typing import Any

from lightning_wlb.cli.request import Request
from lightning_wlb.meshes.dynamic import WORTH, PoolChoice, choose_pool, described
from lightning_wlb.meshes.request import MeshRequest
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.strategy.searching import progress_bar

SAMPLE = 8
"""Steps at most: half to choose the strategies by, and half to judge them."""


def pool_request(request: Request) -> MeshRequest:
    """What a pool is chosen for: the first packing of the comparison that it can be used with.

    Raises:
        ValueError: there is none, there is one step only, or the mesh has virtual stages.
    """
    able = [each for each in request.candidates if PACKINGS[each[0]].arranges]
    if not able:
        names = ", ".join(name for name, packer in PACKINGS.items() if packer.arranges)
        raise ValueError(
            "--dynamic auto: no packing that is compared can deal to pipelines that differ. Give"
            f" --packing one of {names}."
        )
    if request.mesh.virtual_stages > 1:
        raise ValueError(
            f"--dynamic auto: the mesh has {request.mesh.virtual_stages} virtual stages, and"
            " pipelines that differ have none. Give --schedule 1f1b."
        )
    if request.steps < 2:
        raise ValueError("--dynamic auto needs --steps 2 or more.")
    packing, sharding = able[0]
    return MeshRequest(
        lengths=request.lengths,
        shape=request.shape,
        data=request.settings[packing],
        profile=request.profile,
        devices=request.mesh.devices,
        schedule=request.schedule,
        activation_checkpointing=request.checkpointing,
        rest_dtype=request.rest_dtype,
        sharding=sharding,
        steps=min(request.steps, SAMPLE),
    )


def chosen_pool(request: Request) -> PoolChoice:
    """The pool for the mesh of a comparison.

    Raises:
        ValueError: as of :func:`pool_request`.
    """
    asked = pool_request(request)
    with progress_bar() as tell:
        return choose_pool(asked, request.mesh, progress=tell)


def pool_report(choice: PoolChoice) -> dict[str, Any]:
    """The figures as plain data."""
    return {
        "pays": bool(choice.strategies),
        "gain": choice.gain,
        "asked": WORTH,
        "steps": choice.steps,
        "mesh_ms": choice.mesh_ns / 1e6,
        "pool_ms": choice.pool_ns / 1e6,
        "proposed": choice.proposed,
        "strategies": [
            {"pipelines": described(strategy), "chosen": count}
            for strategy, count in zip(choice.tried, choice.chosen, strict=True)
        ],
        "text": choice.lines,
    }
