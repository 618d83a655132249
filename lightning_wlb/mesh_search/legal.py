"""Every mesh that a request allows, and why others are left out.

Pipeline, context and tensor sizes that are not given are powers of two, and the replicas are what
is left, which need not be one (24 devices: 3, 6, 12 or 24 replicas). Tensor-parallel ranks share a
node, because they talk in every layer. A pipeline rank has 1, 2 or 4 stages.

Cost: cubic in the logarithm of the devices; under 0.1 s for 16,384.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.choice import LeftOut, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.sharding import HEADS, check_heads

VIRTUAL_STAGES = (1, 2, 4)


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
    """The meshes that the model, the nodes and the schedule allow.

    Args:
        request: what is searched for.
        reasons: what is left out is added to it.
    """
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
    powers = [1 << power for power in range(devices.bit_length())]
    for tensor in [fixed["tensor"]] if "tensor" in fixed else powers:
        for context in [fixed["context"]] if "context" in fixed else powers:
            for pipeline in [fixed["pipeline"]] if "pipeline" in fixed else powers:
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
        shape.check_tensor_parallel(mesh.tensor)
        if request.sharding == HEADS and mesh.context > 1:
            for layer in shape.kinds:
                check_heads(layer.heads, layer.kv_heads, mesh.context, mesh.tensor)
    except ValueError as error:
        return str(error).partition(". ")[0]
    if mesh.stages > shape.layers:
        return f"more pipeline stages than the {shape.layers} layers"
    return None
