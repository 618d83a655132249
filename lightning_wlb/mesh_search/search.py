"""The search for a mesh: enumerate, prune by a closed form, plan and simulate the best.

1. Every legal mesh is enumerated (:func:`legal_meshes`): every divisor of the number of devices as
   the size of an axis that is not given. Tensor-parallel ranks share a node, because they
   communicate in every layer. A pipeline rank has 1, 2 or 4 stages.
2. Meshes whose state or activations do not fit are left out. The others are ordered by the closed
   form (:mod:`~lightning_wlb.mesh_search.closed_form`).
3. For the first :data:`SAMPLED_MESHES` meshes a sample of the first step is planned and simulated
   by the profile (:mod:`~lightning_wlb.mesh_search.evaluate`): the whole step, or if it has many
   micro-batches a part of it on fewer replicas. For meshes near the fastest the first steps of the
   run follow, one by one. After each step meshes are left out that are further behind than chance
   explains (:data:`NOISE`), which is less the more tokens have been simulated.
4. Among the meshes that have run all steps and are about as fast as the fastest (:data:`CLOSE`),
   the one with the least communication is chosen.

Whole numbers, IEEE arithmetic and ties that go by the sizes make the answer the same on every rank
and processor. Cost: the closed form of every legal mesh, sixteen samples, and all steps of a few
meshes; ``benchmarks/results/search_time.json`` has the times.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.closed_form import ClosedForm
from lightning_wlb.mesh_search.evaluate import SAMPLED, Evaluation, LeftOut, MeshChoice, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.schedule.programs import SCHEDULES

VIRTUAL_STAGES = (1, 2, 4)
"""Stages of a pipeline rank that are tried."""

SAMPLED_MESHES = 16
"""Meshes for which samples are simulated: on 34 settings of 8 to 1,024 GPUs the best known mesh is
among the first sixteen of the closed form, except in one, where it is 1.6 % slower."""

MORE_SAMPLED = 4
"""Further meshes that are sampled if none of these fits."""

CLOSE = 1.01
"""Times of meshes within this factor count as equal, and the mesh with the least communication is
taken: simulations have larger errors than that, and the largest ones for networks."""

NOISE = 0.2
"""Relative difference that chance may make between two meshes' times over the tokens of one
micro-batch: twice what was measured for ``auto``, since whole documents differ more. Over n
micro-batches it is this divided by √n. A mesh further behind is not simulated further."""

PART = 0.05
"""What is added to that where a part of the step on fewer replicas stands for all of it."""

LARGEST = 1 << 16
"""Most devices that are tried if nothing fits on the given ones."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is in all."""


@contextmanager
def progress_bar(search: str) -> Iterator[Progress]:
    """A progress bar for a search; without a terminal it only prints a line with ``search``."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        takes = "which takes seconds for 16 of them, and one to three minutes for 1,024"
        print(f"{search}, {takes}.", file=sys.stderr, flush=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, whole: int) -> None:
            bar.update(task, description=what, completed=done, total=whole)

        yield tell


BEHIND = "slower than others in the first step or steps, or in a part of the first"
TOO_LARGE = "simulated: more than the device's memory"
"""Reasons to leave out meshes whose steps are simulated, in whole or in part."""

LeftOutMeshes = dict[str, list[Mesh]]
"""The meshes that are left out, by reason."""


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
        return (1,)  # A pipeline of one rank has no bubble that more stages could reduce.
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


def silent(what: str, done: int, whole: int) -> None:
    """Shows no progress."""


def choose_mesh(request: MeshRequest, *, progress: Progress = silent) -> MeshChoice:
    """The fastest mesh for a request, and the next best ones.

    Raises:
        ValueError: no mesh is legal, or none fits in memory: why, and how many devices would do.
    """
    found = _search(request, progress)
    if found.rows:
        return found
    raise ValueError(_nothing(request, found))


def _search(request: MeshRequest, tell: Progress) -> MeshChoice:
    """As :func:`choose_mesh`, but without rows if no mesh fits."""
    reasons: LeftOutMeshes = {}
    ordered = _pruned(request, legal_meshes(request, reasons), reasons, tell)
    first, others = ordered[:SAMPLED_MESHES], ordered[SAMPLED_MESHES:]
    fit = _raced(request, [Evaluation(request, mesh) for mesh in first], reasons, tell)
    if not fit:
        more, others = others[:MORE_SAMPLED], others[MORE_SAMPLED:]
        fit = _raced(request, [Evaluation(request, mesh) for mesh in more], reasons, tell)
    if others:
        reasons["slower than others, by the closed form"] = others
    rows = [each.row for each in fit]
    # All meshes train on the same pieces. In a tie the mesh with the most replicas comes first.
    rows.sort(key=lambda row: (row.steps_ns, [-n for n in row.mesh.shape], row.mesh.virtual_stages))
    if rows:
        close = [row for row in rows if row.steps_ns <= CLOSE * rows[0].steps_ns]
        taken = min(close, key=lambda row: row.communication_ns)
        rows.insert(0, rows.pop(rows.index(taken)))
    left_out = (LeftOut(why, len(each), name_of(each[0])) for why, each in reasons.items())
    return MeshChoice(tuple(rows), tuple(left_out))


def _raced(
    request: MeshRequest,
    going_on: list[Evaluation],
    reasons: LeftOutMeshes,
    tell: Progress,
    sampled: bool = False,
) -> list[Evaluation]:
    """Simulate all steps of the meshes that fit and keep up; others go to ``reasons``.

    If no mesh that kept up fits, the meshes that had fallen behind go on (``sampled``).
    """
    left: list[Evaluation] = []
    steps, micro_batches = request.steps, request.data.micro_batches
    for number in range(sampled, steps + 1):
        for done, made in enumerate(going_on):
            done += number * len(going_on)
            tell("simulating meshes", done, (steps + 1) * len(going_on))
            made.go_on(number)
        best = sorted(made.ps for made in going_on if made.fits)[:2] or [0]
        chance = NOISE / math.sqrt(number * micro_batches or min(micro_batches, SAMPLED))
        chance += PART if number == 0 and micro_batches >= 2 * SAMPLED else 0
        # The second best goes on too, to be named beside the best.
        most = max(best[0] * (CLOSE + chance), best[-1])
        ahead = [made for made in going_on if made.fits and (made.ps <= most or number == steps)]
        left += [made for made in going_on if made not in ahead]
        going_on = ahead
    # A sample may exceed the memory even if the mesh's steps fit.
    again = [] if going_on else [made for made in left if made.fits or not made.steps]
    for made in left:
        if made not in again:
            reasons.setdefault(BEHIND if made.fits else TOO_LARGE, []).append(made.mesh)
    return _raced(request, again, reasons, tell, sampled=True) if again else going_on


def _pruned(
    request: MeshRequest, legal: list[Mesh], reasons: LeftOutMeshes, tell: Progress
) -> list[Mesh]:
    """The meshes that fit by the closed form, the fastest by it first."""
    form = ClosedForm(request)
    fit: list[tuple[int, tuple[int, ...], Mesh]] = []
    for number, mesh in enumerate(legal):
        if number % 16 == 0:
            tell("estimating meshes", number, len(legal))
        if step_ns := form.step_ns(mesh):
            fit.append((step_ns, (*mesh.shape, mesh.virtual_stages), mesh))
            continue
        predictor = request.predictor(mesh)
        state = max(predictor.memory.state_bytes) > predictor.usable_bytes
        what = "parameters, gradients and optimizer state" if state else "activations"
        reasons.setdefault(f"{what} do not fit", []).append(mesh)
    return [mesh for _, _, mesh in sorted(fit, key=lambda each: each[:2])]


def _nothing(request: MeshRequest, found: MeshChoice) -> str:
    """Why no mesh was found, and what would help."""
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
    """The least of 2, 4, 8, ... times the given devices on which a mesh fits."""
    devices = 2 * request.devices
    while devices <= LARGEST:
        try:
            if _search(replace(request, devices=devices, steps=1), silent).rows:
                return devices
        except ValueError:  # The profile knows no link between so many.
            return None
        devices *= 2
    return None
