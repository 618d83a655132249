"""Packing methods: one file each, and one line here that registers it.

A packing method says how the documents of an epoch are cut into pieces, which of them may wait,
how the pieces of a step are grouped into micro-batches, and how these are dealt to replicas
(:class:`~lightning_wlb.planning.packing.base.Packer`).
"""

from __future__ import annotations

from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.packing.original import OriginalPacker
from lightning_wlb.planning.packing.wlb import WlbPacker

PACKINGS: dict[str, type[Packer]] = {
    "original": OriginalPacker,
    "wlb": WlbPacker,
}
