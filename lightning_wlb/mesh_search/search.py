"""The search for a mesh: enumerate, prune by a closed form, plan and simulate the best.

1. Every legal mesh is enumerated (:func:`legal_meshes`): every divisor of the number of devices as
   the size of an axis that is not given. Tensor-parallel ranks share a node, because they
   communicate in every layer. A pipeline rank has 1, 2 or 4 stages.
2. Meshes whose state or activations do not fit are left out. The others are ordered by the closed
   form (:mod:`~lightning_wlb.mesh_search.closed_form`).
3. On the first :data:`SIMULATED` of them the first steps of the run are planned and simulated by
   the profile (:mod:`~lightning_wlb.mesh_search.evaluate`), on more where none of these fits after
   all. First comes the one with least communication of those that are about as fast
   (:data:`CLOSE`).

Everything is integers and ties go by the sizes, so the answer is the same on every rank and
processor. Cost: the closed form of every legal mesh and the evaluation of twelve;
``benchmarks/results/meshes.json`` has what that takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from lightning_wlb.cost.memory_model import usable_bytes
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.closed_form import ClosedForm
from lightning_wlb.mesh_search.evaluate import Evaluation, LeftOut, MeshChoice, evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.schedule.programs import SCHEDULES

VIRTUAL_STAGES = (1, 2, 4)
"""Stages of a pipeline rank that are tried."""

SIMULATED = 12
"""Meshes that are planned and simulated: on the settings of ``benchmarks/results/meshes.json`` the
best mesh that is known is among the first eleven of the closed form."""

SIMULATED_LARGE = 4
"""The same on more than ``LARGE`` devices, where planning takes seconds for a mesh."""

LARGE = 256

MOST_SIMULATED = 16
"""Meshes that are simulated where none of them fits."""

CLOSE = 1.01
"""Times of meshes that differ by no more count as equal, and the mesh with least communication is
taken: simulations are further from the truth than that, and furthest in what networks do."""

LARGEST = 1 << 16
"""Most devices that are tried where nothing fits on those given."""

TAKES = "which takes seconds for 16 of them, and a minute or two for 1,024"
"""How long a search lasts, in words."""

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


@contextmanager
def progress_bar(search: str) -> Iterator[Progress]:
    """A bar that a search moves; where no terminal can show it, a line that says ``search``."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        print(search, file=sys.stderr, flush=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, whole: int) -> None:
            bar.update(task, description=what, completed=done, total=whole)

        yield tell


LeftOutMeshes = dict[str, list[Mesh]]
"""What is left out, by reason."""


def legal_meshes(request: MeshRequest, reasons: LeftOutMeshes | None = None) -> list[Mesh]:
    """The meshes that the model, the nodes and the schedule allow; others go to ``reasons``."""
    legal = []
    reasons = {} if reasons is None else reasons
    for mesh in _meshes(request):
        if (reason := _objection(request, mesh)) is None:
            legal.append(mesh)
        else:
            reasons.setdefault(reason, []).append(mesh)
    return legal


def _meshes(request: MeshRequest) -> Iterator[Mesh]:
    """All sizes whose product is the number of devices, with numbers of virtual stages."""
    fixed, devices = request.fixed, request.devices
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for tensor in [fixed["tensor"]] if "tensor" in fixed else sizes:
        for context in [fixed["context"]] if "context" in fixed else sizes:
            for pipeline in [fixed["pipeline"]] if "pipeline" in fixed else sizes:
                data, rest = divmod(devices, pipeline * context * tensor)
                if rest or data == 0 or fixed.get("data", data) != data:
                    continue
                for virtual in _virtual_stages(request, pipeline):
                    yield Mesh(data, pipeline, context, tensor, virtual)


def _virtual_stages(request: MeshRequest, pipeline: int) -> tuple[int, ...]:
    if pipeline == 1:
        return (1,)  # A pipeline of one rank has no bubble that more stages would fill.
    if request.virtual_stages is not None:
        return (request.virtual_stages,)
    if request.schedule is None:
        return VIRTUAL_STAGES
    return VIRTUAL_STAGES[1:] if SCHEDULES[request.schedule].virtual_stages else (1,)


def _objection(request: MeshRequest, mesh: Mesh) -> str | None:
    """The reason why a mesh cannot be run; None if it can."""
    per_node, shape = request.profile.devices_per_node, request.shape
    if mesh.tensor > per_node or (mesh.devices > per_node and per_node % mesh.tensor):
        return f"tensor-parallel ranks in different nodes ({per_node} devices each)"
    try:
        shape.check_tensor_parallel(mesh.tensor, mesh.context)
    except ValueError as error:
        return str(error).partition(". ")[0]
    if mesh.stages > shape.layers:
        return f"more pipeline stages than the {shape.layers} layers"
    return None


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
    reasons: LeftOutMeshes = {}
    ordered = _pruned(request, legal_meshes(request, reasons), reasons, tell)
    enough = SIMULATED_LARGE if request.devices > LARGE else SIMULATED
    made: list[Evaluation] = []
    for number, mesh in enumerate(ordered[:MOST_SIMULATED]):
        if number >= enough and any(each.fits for each in made):
            break
        tell("simulating meshes", number, max(enough, number + 1))
        made.append(evaluate(request, mesh))
    if slower := ordered[len(made) :]:
        reasons["slower than others, by the closed form"] = slower
    if too_large := [each.row.mesh for each in made if not each.fits]:
        reasons["simulated: more than the device's memory"] = too_large
    fit = sorted((each for each in made if each.fits), key=lambda each: each.order)
    close = [each for each in fit if each.row.steps_ns <= CLOSE * fit[0].row.steps_ns]
    if close:
        taken = min(close, key=lambda each: (each.row.communication_ns, each.order))
        fit.insert(0, fit.pop(fit.index(taken)))
    left_out = (LeftOut(why, len(each), name_of(each[0])) for why, each in reasons.items())
    return MeshChoice(tuple(each.row for each in fit), tuple(left_out), request.digest)


def _pruned(
    request: MeshRequest, legal: list[Mesh], reasons: LeftOutMeshes, tell: Progress
) -> list[Mesh]:
    """The meshes that fit by the closed form, best first by it."""
    form = ClosedForm(request)
    fit: list[tuple[int, tuple[int, ...], Mesh]] = []
    for number, mesh in enumerate(legal):
        if number % 16 == 0:
            tell("estimating meshes", number, len(legal))
        estimate = form.estimate(mesh)
        if estimate.step_ns:
            fit.append((estimate.step_ns, (*mesh.shape, mesh.virtual_stages), mesh))
            continue
        state = estimate.state_bytes > usable_bytes(request.profile, mesh)
        what = "parameters, gradients and optimizer state" if state else "activations"
        reasons.setdefault(f"{what} do not fit", []).append(mesh)
    return [mesh for _, _, mesh in sorted(fit, key=lambda each: each[:2])]


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
    """The least number of devices on which a mesh fits: twice, four times, ... those given."""
    devices = 2 * request.devices
    while devices <= LARGEST:
        try:
            if _search(replace(request, devices=devices, steps=1), _silent).rows:
                return devices
        except ValueError:  # The profile knows no link between so many.
            return None
        devices *= 2
    return None


def _silent(what: str, done: int, whole: int) -> None:
    """Progress that nobody asked for."""
