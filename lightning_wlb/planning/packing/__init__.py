"""Packing methods: one file each, and one line here that registers it.

A packing method says how the documents of an epoch are cut into pieces, which of them may wait,
how the pieces of a step are grouped into micro-batches, and how these are dealt to replicas
(:class:`~lightning_wlb.planning.packing.base.Packer`).
"""

from __future__ import annotations

from lightning_wlb.planning.packing.auto import AutoPacker
from lightning_wlb.planning.packing.balanced import BalancedPacker
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.packing.best_fit import BestFitPacker
from lightning_wlb.planning.packing.fixed_greedy import FixedGreedyPacker
from lightning_wlb.planning.packing.fixed_ilp import FixedIlpPacker
from lightning_wlb.planning.packing.original import OriginalPacker
from lightning_wlb.planning.packing.slim import SlimPacker
from lightning_wlb.planning.packing.tapered import TaperedPacker
from lightning_wlb.planning.packing.varlen_ilp import VarlenIlpPacker
from lightning_wlb.planning.packing.wlb import WlbPacker

PACKINGS: dict[str, type[Packer]] = {
    "original": OriginalPacker,
    "fixed_greedy": FixedGreedyPacker,
    "fixed_ilp": FixedIlpPacker,
    "varlen_ilp": VarlenIlpPacker,
    "wlb": WlbPacker,
    "best_fit": BestFitPacker,
    "balanced": BalancedPacker,
    "tapered": TaperedPacker,
    "slim": SlimPacker,
    "auto": AutoPacker,
}
