"""The search for a mesh: enumerate, prune, simulate by work, plan the best again by profile.

1. Every legal mesh is enumerated (:mod:`~lightning_wlb.mesh_search.legal`).
2. Those whose state or activations do not fit are left out. Of the others the closed form
   (:mod:`~lightning_wlb.mesh_search.bound`) keeps the best :data:`KEPT`, and of each size of an
   axis the best that is not :data:`HOPELESS`, for it orders good meshes badly.
3. The first steps of the run are planned on each by exact work, and predicted by the profile
   (:mod:`~lightning_wlb.mesh_search.evaluate`), which takes a part of the time of planning by
   profile. A single mesh may be far better by profile, where memory decides the micro-batches.
4. So the best, the best of each size of an axis, and the first of the closed form are planned again
   by the profile, and ordered by what they take then. (A packing that tries one plan of a step is
   planned once.)

On more than :data:`LARGE` devices, where planning takes seconds for a mesh, less is simulated.

Everything is integers and ties go by the sizes, so the answer is the same on every rank and
processor. Cost: the closed form of every legal mesh, 16 to 30 evaluations by work and some by
profile; ``benchmarks/results/meshes.json`` has what that takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_wlb.cost.memory_model import usable_bytes
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.bound import ClosedForm
from lightning_wlb.mesh_search.choice import MeshChoice
from lightning_wlb.mesh_search.evaluate import Evaluation, evaluate
from lightning_wlb.mesh_search.legal import Reasons, legal_meshes
from lightning_wlb.mesh_search.request import MeshRequest

KEPT = 16
"""Meshes that the closed form keeps."""

HOPELESS = 2
"""What the closed form finds so many times as slow as the best mesh is not simulated."""

SHOWN = 5
"""Meshes that are planned by profile, beside the best of each size of an axis."""

COMPARED_AXES = ("pipeline", "virtual_stages", "context", "tensor")
"""Of each size of these the best is simulated, and planned by profile."""

FIRST = 3
"""Of the closed form's order so many are planned by profile, whatever planning by work says."""

LARGE = 256
"""On more devices meshes are simulated by work on one step, which has many documents there, and
fewer are planned by profile."""

SHOWN_LARGE = 3
"""Meshes that are planned by profile then."""

LARGEST = 1 << 16
"""Devices up to which a number that fits is searched for."""

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


def choose_mesh(request: MeshRequest, *, progress: Progress | None = None) -> MeshChoice:
    """The fastest mesh for a request, with the next ones.

    Args:
        request: documents, model, settings and device.
        progress: is told how far the search is.

    Raises:
        ValueError: no mesh is legal, or none fits in memory; the message says why, and how many
            devices would do.
    """
    found = _search(request, progress or _silent)
    if found.rows:
        return found
    raise ValueError(_nothing(request, found))


def _search(request: MeshRequest, tell: Progress) -> MeshChoice:
    """As :func:`choose_mesh`, with no rows where no mesh fits."""
    reasons = Reasons()
    by_work = []
    kept = _pruned(request, legal_meshes(request, reasons), reasons, tell)
    large = request.devices > LARGE
    sample = replace(request, steps=1) if large else request
    # Packings that try one plan of a step plan the same either way.
    once = not large and not request.data.packer.judges
    for number, mesh in enumerate(kept):
        tell("simulating meshes", number, len(kept))
        by_work.append(evaluate(sample, mesh, by_profile=once))
    best = kept if once else _worth_planning(by_work, large)
    by_profile = by_work if once else []
    for number, mesh in enumerate(() if once else best):
        tell("planning by profile", number, len(best))
        by_profile.append(evaluate(request, mesh))
    by_work.sort(key=lambda each: each.order)
    # What fits in one step, or as planned by work, may not fit in all as planned by profile.
    left = [each.row.mesh for each in by_work if each.fits and each.row.mesh not in best]
    while left and not any(each.fits for each in by_profile):
        best.append(left.pop(0))
        by_profile.append(evaluate(request, best[-1]))
    by_profile.sort(key=lambda each: each.order)
    others = [each for each in by_work if each.row.mesh not in best]
    for each in by_profile + others:
        if not each.fits:
            reasons.add("simulated: more than the device's memory", each.row.mesh)
    return MeshChoice(
        rows=tuple(each.row for each in by_profile if each.fits),
        others=tuple(each.row for each in others if each.fits),
        left_out=reasons.left_out,
        digest=request.digest,
    )


def _worth_planning(by_work: list[Evaluation], large: bool) -> list[Mesh]:
    """Of meshes planned by work, the best by the closed form first, those to plan by profile.

    Of those that fit the fastest, and unless that takes too long the fastest of each size of an
    axis and the first by the closed form, which is wrong in other ways; and of those that do not
    fit as planned by work the fastest, for as planned by profile, which knows the memory, they may.
    """
    ordered = sorted(by_work, key=lambda each: each.order)
    fit = [each for each in ordered if each.fits]
    too_large = [each for each in ordered if not each.fits]
    most = SHOWN_LARGE if large else SHOWN
    chosen = fit[:most]
    if not large:
        for axis in COMPARED_AXES:
            chosen += {getattr(each.row.mesh, axis): each for each in reversed(fit)}.values()
        chosen += [each for each in by_work if each.fits][:FIRST]
    if fit:
        too_large = [each for each in too_large if each.row.steps_ns < fit[0].row.steps_ns]
    return list(dict.fromkeys(each.row.mesh for each in chosen + too_large[:most]))


def _pruned(
    request: MeshRequest, legal: list[Mesh], reasons: Reasons, tell: Progress
) -> list[Mesh]:
    """The meshes worth simulating, best first by the closed form."""
    form = ClosedForm(request)
    fit: list[tuple[int, Mesh]] = []
    for number, mesh in enumerate(legal):
        if number % 16 == 0:
            tell("estimating meshes", number, len(legal))
        estimate = form.estimate(mesh)
        if estimate.state_bytes > usable_bytes(request.profile, mesh):
            reasons.add("parameters, gradients and optimizer state do not fit", mesh)
        elif not estimate.step_ns:
            reasons.add("activations do not fit, by the closed form", mesh)
        else:
            fit.append((estimate.step_ns, mesh))
    fit.sort(key=lambda each: (each[0], each[1].shape, each[1].virtual_stages))
    ordered = [mesh for _, mesh in fit]
    kept = set(ordered[:KEPT])
    for axis in COMPARED_AXES if request.devices <= LARGE else ():
        seen: set[int] = set()
        for step_ns, mesh in fit:
            if step_ns <= HOPELESS * fit[0][0] and (size := getattr(mesh, axis)) not in seen:
                seen.add(size)
                kept.add(mesh)
    for mesh in ordered:
        if mesh not in kept:
            reasons.add("slower than others, by the closed form", mesh)
    return [mesh for mesh in ordered if mesh in kept]


def _nothing(request: MeshRequest, found: MeshChoice) -> str:
    """Why nothing was found, and what would help."""
    why = "; ".join(f"{each.reason}: {each.count}, as {each.example}" for each in found.left_out)
    smallest = None if set(request.fixed) >= set(AXES) else _smallest(request)
    remedy = (
        f"With {smallest} devices there is one"
        if smallest
        else "More devices alone do not help: take a smaller model, a shorter context window or"
        " a longer node, or leave sizes of the mesh open"
    )
    return (
        f"No mesh of {request.devices} devices, {request.profile.devices_per_node} to a node, can"
        f" run this ({why or 'the sizes given allow none'};"
        f" {request.usable_bytes / 1e9:.1f} GB of a device may be filled). {remedy}."
    )


def _smallest(request: MeshRequest) -> int | None:
    """The smallest number of devices on which a mesh fits, of twice, four times, ... as many."""
    devices = 2 * request.devices
    while devices <= LARGEST:
        larger = replace(request, devices=devices)
        try:
            kept = _pruned(larger, legal_meshes(larger, reasons := Reasons()), reasons, _silent)
        except ValueError:  # The profile knows no link between so many.
            return None
        if any(evaluate(larger, mesh).fits for mesh in kept[:SHOWN]):
            return devices
        devices *= 2
    return None


def _silent(what: str, done: int, whole: int) -> None:
    """Progress that nobody asked for."""
