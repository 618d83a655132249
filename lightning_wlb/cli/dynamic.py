"""What `lightning-wlb plan --dynamic auto` adds: whether steps should leave the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lightning_wlb.cli.request import Request
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


def pool_request(request: Request) -> MeshRequest:
    """What a pool is chosen for: the first packing of the comparison that it can be used with.

    Raises:
        ValueError: there is none, there is one step only, or the mesh has virtual stages.
    """
    able = _able(request)
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
    run = {each.name: getattr(request, each.name) for each in fields(MeshRequest) if each.init}
    open_mesh: dict[str, Any] = {"fixed": {}, "virtual_stages": None, "sharding": sharding}
    steps = min(request.steps, SAMPLE)
    return MeshRequest(**run | open_mesh | {"data": request.settings[packing], "steps": steps})


def _able(request: Request) -> list[tuple[str, str]]:
    """Packings that are compared, with their shardings, whose steps can leave the mesh."""
    return [each for each in request.candidates if PACKINGS[each[0]].arranges]


def chosen_pool(request: Request) -> PoolChoice:
    """The pool for the mesh of a comparison.

    Raises:
        ValueError: as of :func:`pool_request`.
    """
    asked = pool_request(request)
    with progress_bar() as tell:
        return choose_pool(asked, request.mesh, progress=tell)


def best_step(request: Request, choice: PoolChoice) -> dict[str, Sequence[Simulation]]:
    """The step that gains most by leaving the mesh: its replicas there, and pipelines that are
    alike, by what they are called. Empty where no step leaves the mesh.
    """
    if not choice.tried:
        return {}
    base, (packing, sharding) = request.predictor(), _able(request)[0]
    checkpointing, steps = request.activation_checkpointing, min(request.steps, SAMPLE)
    pool = Pool.of(choice.tried, base, checkpointing, sharding)
    scorer = ProfileScorer(base, checkpointing)
    on_mesh, chosen = (
        plan_steps(request.planner(packing, sharding, scorer, each), steps) for each in (None, pool)
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
