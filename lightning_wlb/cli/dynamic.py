"""What `lightning-wlb plan --dynamic auto` adds: whether steps should leave the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import (
    SAMPLE,
    WORTH,
    PoolChoice,
    choose_pool,
    described,
)
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import progress_bar
from lightning_wlb.plan import alike
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.schedule.simulator import Simulation


def pool_request(requests: Sequence[MeshRequest]) -> MeshRequest:
    """What a pool is chosen for: the first packing of the comparison that it can be used with.

    Args:
        requests: those of the comparison, with the sizes of one mesh.

    Raises:
        ValueError: there is none, there is one step only, or the mesh has virtual stages.
    """
    able = [each for each in requests if each.data.packer.arranges]
    if not able:
        names = ", ".join(name for name, packer in PACKINGS.items() if packer.arranges)
        raise ValueError(
            "--dynamic auto: no packing that is compared can deal to pipelines that differ. Give"
            f" --packing one of {names}."
        )
    request = able[0]
    if request.mesh.virtual_stages > 1:
        raise ValueError(
            f"--dynamic auto: the mesh has {request.mesh.virtual_stages} virtual stages, and"
            " pipelines that differ have none. Give --schedule 1f1b."
        )
    if request.steps < 2:
        raise ValueError("--dynamic auto needs --steps 2 or more.")
    return replace(request, steps=min(request.steps, SAMPLE))


def chosen_pool(request: MeshRequest) -> PoolChoice:
    """The pool for the mesh of a comparison; ``request`` is what :func:`pool_request` gave."""
    with progress_bar() as tell:
        # The pipelines of a pool may have any sizes.
        return choose_pool(replace(request, fixed={}), request.mesh, progress=tell)


def best_step(request: MeshRequest, choice: PoolChoice) -> dict[str, Sequence[Simulation]]:
    """The step that gains most by leaving the mesh: its replicas there, and pipelines that are
    alike, by what they are called. Empty where no step leaves the mesh.
    """
    if not choice.tried:
        return {}
    base, checkpointing = request.predictor(request.mesh), request.activation_checkpointing
    pool = Pool.of(choice.tried, base, checkpointing, request.sharding)
    scorer = ProfileScorer(base, checkpointing)
    on_mesh, chosen = (
        plan_steps(request.planner(base, scorer, each), request.steps) for each in (None, pool)
    )
    left = [
        (base.predict(one), pool.predict(other, base))
        for one, other in zip(on_mesh, chosen, strict=True)
        if other.schemes
    ]
    if not left:
        return {}
    one, other = max(left, key=lambda pair: pair[0].total_ns / pair[1].total_ns)
    said = f"step {one.plan.step}, which gains most by leaving the mesh"
    found: dict[str, Sequence[Simulation]] = {f"{said}: on the mesh": one.simulations}
    strategy = other.plan.schemes
    for numbers in alike(strategy).values():
        latest = f", the latest of {len(numbers)} alike" if len(numbers) > 1 else ""
        simulations = [other.simulations[number] for number in numbers]
        found[f"step {one.plan.step} on {strategy[numbers[0]]}{latest}"] = simulations
    return found


def pool_report(choice: PoolChoice) -> dict[str, Any]:
    """The figures as plain data."""
    return {
        "pays": bool(choice.schemes),
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
