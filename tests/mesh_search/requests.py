"""Requests that are searched in a tenth of a second or so."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.planning import DataSettings

SMALL = ModelShape(1024, 8, 16, 4, 64, 2816, 32_000)


def request(
    devices: int = 4,
    lengths: Any = None,
    shape: ModelShape = SMALL,
    window: int = 4096,
    micro_batches: int = 4,
    packing: str = "auto",
    **changes: Any,
) -> MeshRequest:
    """A small model on few devices of the h100 profile."""
    if lengths is None:
        lengths = np.random.default_rng(0).integers(64, window, 60)
    profile = changes.pop("profile", None) or Profile.load("h100")
    data = DataSettings(window, micro_batches, packing=packing)
    changes = {"steps": 2} | changes
    return MeshRequest(np.asarray(lengths), shape, data, profile, devices, **changes)
