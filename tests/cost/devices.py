"""Devices of any size, for tests of what fits."""

from __future__ import annotations

from dataclasses import replace

from lightning_wlb.cost.communication import COMMUNICATOR_BYTES, communicators
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import ONE_DEVICE, Mesh


def with_usable(profile: Profile, usable: int, mesh: Mesh = ONE_DEVICE) -> Profile:
    """The profile with as much memory that ``usable`` bytes of it may be filled on the mesh."""
    groups = communicators(mesh) * COMMUNICATOR_BYTES
    memory = max(-(-usable * 100 // 92), -(-(usable + groups) * 100 // 97))
    return replace(profile, memory_bytes=memory)
