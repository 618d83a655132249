"""torch's DeviceMesh of a :class:`~lightning_wlb.mesh.Mesh`, which says how ranks are ordered."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_wlb.mesh import AXES, Mesh


def device_mesh(mesh: Mesh, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The four-axis DeviceMesh on ``"cuda"`` or ``"cpu"``; collective over all ranks.

    Operations on its axes may wait for ``timeout``; None means torch's default.
    """
    made = init_device_mesh(device_type, mesh.shape, mesh_dim_names=AXES)
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
    return mesh["data", "context"]._flatten("data_context")


def set_timeout(timeout: timedelta, *groups: ProcessGroup | None) -> None:
    """Let operations on the groups wait for ``timeout`` from now on."""
    for group in groups:
        _set_pg_timeout(timeout, group)
