"""The packing methods by name; one line here registers another.

A packing method says how the documents of an epoch are cut into pieces, which of them may wait,
how the pieces of a step become micro-batches, and how these are dealt to replicas
(:class:`~lightning_wlb.planning.packing.base.Packer`). Its own options are the fields of its
dataclass ``Packer.Options``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_wlb.argument_checks import choice
from lightning_wlb.planning.packing.auto import AutoPacker
from lightning_wlb.planning.packing.base import Packer, PackingOptions
from lightning_wlb.planning.packing.baselines import (
    BestFitPacker,
    FixedGreedyPacker,
    OriginalPacker,
)
from lightning_wlb.planning.packing.hydraulis import HydraulisPacker
from lightning_wlb.planning.packing.slim import SlimPacker
from lightning_wlb.planning.packing.wlb import WlbPacker

PACKINGS: dict[str, type[Packer]] = {
    "original": OriginalPacker,
    "fixed_greedy": FixedGreedyPacker,
    "wlb": WlbPacker,
    "best_fit": BestFitPacker,
    "hydraulis": HydraulisPacker,
    "slim": SlimPacker,
    "auto": AutoPacker,
}
"""Packing methods by name."""


@dataclass(frozen=True)
class PackingChoice:
    """A packing method with its options.

    Args:
        method: a name in :data:`PACKINGS`.
        options: an instance of the method's ``Options``.
    """

    method: str
    options: PackingOptions

    def __post_init__(self) -> None:
        made = PACKINGS[choice("packing", self.method, PACKINGS)].Options
        if type(self.options) is not made:
            raise ValueError(
                f"packing {self.method!r} takes {made.__name__}, not"
                f" {type(self.options).__name__}. Give {{'method': {self.method!r}, ...}} with the"
                " options by name."
            )

    @staticmethod
    def of(given: str | Mapping[str, Any] | PackingChoice) -> PackingChoice:
        """The choice from a method's name, or from ``{"method": name, option: value, ...}``.

        Raises:
            ValueError: an unknown method, or an option that it has not or that is out of range;
                the message lists those that are known.
        """
        if isinstance(given, PackingChoice):
            return given
        options = dict(given) if isinstance(given, Mapping) else {"method": given}
        if "method" not in options:
            raise ValueError(
                f"packing={options!r} names no method. Write it as in"
                " {'method': 'wlb', 'queues': 3}, or give the name alone: 'wlb'."
            )
        method = choice("packing", options.pop("method"), PACKINGS)
        made = PACKINGS[method].Options
        known = [field.name for field in fields(made)]
        for name in options:
            if name not in known:
                takes = f"It takes {', '.join(known)}." if known else "It takes none."
                raise ValueError(f"packing {method!r} has no option {name!r}. {takes}")
        return PackingChoice(method, made(**options))
