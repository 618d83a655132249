"""The search for a mesh: enumerate, prune, simulate by work, plan the best again by profile.

1. Every legal mesh is enumerated (:func:`legal_meshes`): every divisor of the number of devices as
   the size of an axis that is not given. Tensor-parallel ranks share a node, because they
   communicate in every layer. A pipeline rank has 1, 2 or 4 stages.
2. Meshes whose state or activations do not fit are left out. Of the others the closed form
   (:mod:`~lightning_wlb.mesh_search.closed_form`) keeps the best :data:`KEPT`.
3. On each mesh the first steps of the run are planned by exact work and predicted by the profile
   (:mod:`~lightning_wlb.mesh_search.evaluate`). That takes less time than planning by profile, by
   which some meshes may be far better: where memory decides the micro-batches.
4. So the best meshes and the first of the closed form are planned again by profile, and ordered by
   their times then; first comes the one with least communication of those that are about as
   fast (:data:`CLOSE`). On the settings of ``benchmarks/results/meshes.json`` the best of all
   meshes is among them. (With a packing that tries one plan of a step, meshes are planned once.)

On more than :data:`LARGE` devices, where planning takes seconds for a mesh, less is simulated.

Everything is integers and ties go by the sizes, so the answer is the same on every rank and
processor. Cost: the closed form of every legal mesh, 16 evaluations by work and some by profile;
``benchmarks/results/meshes.json`` has what that takes.
"""

from __future__ import annotations

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

KEPT = 16
"""Meshes that the closed form keeps: on all settings of ``benchmarks/results/meshes.json`` the best
mesh is one of them."""

SHOWN = 5
"""Meshes that are planned by profile, as the fastest by work."""

FIRST = 3
"""How many of the closed form's best are planned by profile, whatever planning by work says. It is
what finds the best mesh on three settings of ``benchmarks/results/meshes.json``."""

CLOSE = 1.01
"""Times of meshes that differ by no more count as equal, and the mesh with least communication is
taken: simulations are further from the truth than that, and furthest in what networks do."""

LARGE = 256
"""On more devices meshes are simulated by work on one step, which has many documents there, and
fewer are planned by profile."""

SHOWN_LARGE = 3
"""Meshes that are planned by profile on more than :data:`LARGE` devices."""

LARGEST = 1 << 16
"""Most devices that are tried where nothing fits on those given."""

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar that a search moves, where there is a terminal to show it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, whole: int) -> None:
            bar.update(task, description=what, completed=done, total=whole)

        yield tell


class Reasons:
    """Counts what is left out, by reason."""

    def __init__(self) -> None:
        self._found: dict[str, list[Mesh]] = {}

    def add(self, reason: str, mesh: Mesh) -> None:
        """Leave a mesh out."""
        self._found.setdefault(reason, []).append(mesh)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """By reason, in the order in which they came first."""
        return tuple(
            LeftOut(reason, len(meshes), name_of(meshes[0]))
            for reason, meshes in self._found.items()
        )


def legal_meshes(request: MeshRequest, reasons: Reasons) -> list[Mesh]:
    """The meshes that the model, the nodes and the schedule allow; others go to ``reasons``."""
    legal = []
    for mesh in _meshes(request):
        if (reason := _objection(request, mesh)) is None:
            legal.append(mesh)
        else:
            reasons.add(reason, mesh)
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
    """Why a mesh cannot be run, if it cannot."""
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
    reasons = Reasons()
    by_work = []
    kept = _pruned(request, legal_meshes(request, reasons), reasons, tell)
    large = request.devices > LARGE
    sample = replace(request, steps=1) if large else request
    # Packings that try one plan of a step plan the same either way.
    once = not large and not request.data.packer.compares_plans
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
    fit = [each for each in by_profile if each.fits]
    close = [each for each in fit if each.row.steps_ns <= CLOSE * fit[0].row.steps_ns]
    if close:
        taken = min(close, key=lambda each: (each.row.communication_ns, each.order))
        fit.insert(0, fit.pop(fit.index(taken)))
    return MeshChoice(
        rows=tuple(each.row for each in fit),
        others=tuple(each.row for each in others if each.fits),
        left_out=reasons.left_out,
        digest=request.digest,
    )


def _worth_planning(by_work: list[Evaluation], large: bool) -> list[Mesh]:
    """The meshes to plan by profile, of those planned by work (the closed form's best first).

    These are the fastest that fit, and the first by the closed form, which errs in other ways than
    planning by work. Last come the fastest of those that do not fit: planned by profile, which
    knows the memory, they may fit.
    """
    ordered = sorted(by_work, key=lambda each: each.order)
    fit = [each for each in ordered if each.fits]
    too_large = [each for each in ordered if not each.fits]
    most = SHOWN_LARGE if large else SHOWN
    chosen = fit[:most]
    if not large:
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
    for mesh in ordered[KEPT:]:
        reasons.add("slower than others, by the closed form", mesh)
    return ordered[:KEPT]


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
    """The least number of devices on which a mesh fits: twice, four times, ... those given.

    Virtual stages save no memory and take long to simulate, so meshes with them are not asked.
    """
    devices = 2 * request.devices
    while devices <= LARGEST:
        larger = replace(request, devices=devices, steps=1)
        try:
            kept = _pruned(larger, legal_meshes(larger, reasons := Reasons()), reasons, _silent)
        except ValueError:  # The profile knows no link between so many.
            return None
        plain = [mesh for mesh in kept if mesh.virtual_stages == 1 or request.virtual_stages]
        if any(evaluate(larger, mesh).fits for mesh in plain[:SHOWN]):
            return devices
        devices *= 2
    return None


def _silent(what: str, done: int, whole: int) -> None:
    """Progress that nobody asked for."""
