"""Fills in the sizes of a :class:`~lightning_wlb.mesh.Mesh`, and makes a DeviceMesh of it.

:mod:`lightning_wlb.mesh` says how ranks are ordered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_wlb.argument_checks import whole
from lightning_wlb.mesh import AXES, Mesh

Size = int | Literal["auto"]


def checked_sizes(*sizes: Size) -> tuple[Size, ...]:
    """The sizes of the axes, in mesh order, if each is one.

    Raises:
        MisconfigurationException: for anything but ``"auto"`` and whole numbers of at least 1.
    """
    checked: list[Size] = []
    for axis, size in zip(AXES, sizes, strict=True):
        name = f"{axis}_parallel_size"
        try:
            checked.append(
                "auto" if isinstance(size, str) and size == "auto" else whole(name, size, 1)
            )
        except ValueError:
            raise MisconfigurationException(
                f'{name}={size!r} is not a size: give a whole number >= 1 or "auto".'
            ) from None
    return tuple(checked)


def resolve_mesh(
    world_size: int,
    data: Size = "auto",
    pipeline: Size = 1,
    context: Size = 1,
    tensor: Size = 1,
    *,
    virtual_stages: int = 1,
) -> Mesh:
    """Fill in ``"auto"``: the first such axis, in mesh order, takes the ranks that are left.

    Any further ``"auto"`` is 1.

    Raises:
        MisconfigurationException: a size is not a positive whole number, or the product of the
            sizes is not the world size.
    """
    asked = dict(zip(AXES, checked_sizes(data, pipeline, context, tensor), strict=True))
    fixed = math.prod(size for size in asked.values() if size != "auto")
    sizes: dict[str, int] = {}
    rest = world_size // fixed
    for axis, size in asked.items():
        if size == "auto":
            sizes[axis], rest = max(rest, 1), 1
        else:
            sizes[axis] = size
    mesh = Mesh(**sizes, virtual_stages=virtual_stages)
    if mesh.devices != world_size:
        shown = " × ".join(f"{axis} {size}" for axis, size in asked.items())
        raise MisconfigurationException(
            f"The mesh {shown} needs a multiple of {fixed} ranks"
            f"{'' if 'auto' in asked.values() else ' and exactly that many'}, but the Trainer"
            f" runs {world_size} (devices × num_nodes). Change devices or num_nodes, or the"
            " *_parallel_size arguments of WLBStrategy, so that their product is the number"
            ' of ranks; one of them may be "auto".'
        )
    return mesh


def is_settled(world_size: int, asked: Sequence[Size]) -> bool:
    """Whether only one mesh has the sizes asked for, so that there is nothing to choose."""
    fixed = math.prod(size for size in asked if size != "auto")
    return fixed >= world_size or asked.count("auto") <= 1


def device_mesh(mesh: Mesh, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The four-axis DeviceMesh on ``"cuda"`` or ``"cpu"``; collective over all ranks.

    Operations on its axes may wait for ``timeout``; None means torch's default.
    """
    backend = _override(device_type)
    override: dict[int | str, Any] | None = dict.fromkeys(AXES, backend) if backend else None
    made = init_device_mesh(device_type, mesh.shape, mesh_dim_names=AXES, backend_override=override)
    flat = data_context(made)
    if timeout is not None:
        # torch gives the axes its own default, whatever the default group was given.
        set_timeout(timeout, *made.get_all_groups(), flat.get_group())
    return made


def data_context(mesh: DeviceMesh) -> DeviceMesh:
    """The data and context axes as one: its ranks share the parameters, and gradients are summed
    over it.

    Collective at its first call for a mesh, which :func:`device_mesh` makes.
    """
    override = _override(mesh.device_type)
    return mesh["data", "context"]._flatten("data_context", backend_override=override)


def is_cuda_over_gloo(device: torch.device, group: ProcessGroup) -> bool:
    """Whether a group sends a GPU's tensors by gloo."""
    return device.type == "cuda" and group._get_backend(device).name() == "gloo"


def _override(device_type: str) -> str | None:
    """The backend of the axes; None for the default group's.

    On machines with CUDA torch may give NCCL to an axis of all ranks although these have gloo (2.9
    does, 2.13 does not; read), and NCCL refuses two ranks on one GPU.
    """
    world = dist.group.WORLD
    assert world is not None
    return "gloo" if is_cuda_over_gloo(torch.device(device_type), world) else None


def set_timeout(timeout: timedelta, *groups: ProcessGroup | None) -> None:
    """Let operations on the groups wait for ``timeout`` from now on."""
    for group in groups:
        _set_pg_timeout(timeout, group)
