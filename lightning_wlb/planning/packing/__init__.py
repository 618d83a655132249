"""The packing methods by name; one line here registers another.

A packing method says how the documents of an epoch are cut into pieces, which of them may wait,
how the pieces of a step become micro-batches, and how these are dealt to replicas
(:class:`~lightning_wlb.planning.packing.base.Packer`). ``Packer.Options`` has its own options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_wlb.argument_checks import check_names, choice
from lightning_wlb.planning.packing.auto import AutoPacker
from lightning_wlb.planning.packing.base import Packer, PackingOptions
from lightning_wlb.planning.packing.baselines import BestFitPacker, OriginalPacker
from lightning_wlb.planning.packing.hydraulis import HydraulisPacker
from lightning_wlb.planning.packing.slim import SlimPacker
from lightning_wlb.planning.packing.wlb import WlbPacker

PACKINGS: dict[str, type[Packer]] = {
    "original": OriginalPacker,
    "wlb": WlbPacker,
    "best_fit": BestFitPacker,
    "hydraulis": HydraulisPacker,
    "slim": SlimPacker,
    "auto": AutoPacker,
}
"""Packing methods by name."""


@dataclass(frozen=True)
class PackingChoice:
    """A packing method with its options."""

    packer: type[Packer]  #: the method
    options: PackingOptions  #: an instance of its ``Options``

    @property
    def method(self) -> str:
        """The method's name in :data:`PACKINGS`, or the name of a class that is not in it."""
        names = (name for name, packer in PACKINGS.items() if packer is self.packer)
        return next(names, self.packer.__name__)

    @staticmethod
    def of(given: str | type[Packer] | Mapping[str, Any] | PackingChoice) -> PackingChoice:
        """The choice from a method's name, or from ``{"method": name, option: value, ...}``.

        In place of a name, ``method`` may be a subclass of ``Packer`` outside :data:`PACKINGS`.

        Raises:
            ValueError: an unknown method or option (the message lists the known), or a wrong value.
        """
        if isinstance(given, PackingChoice):
            return given
        options = dict(given) if isinstance(given, Mapping) else {"method": given}
        if "method" not in options:
            raise ValueError(
                f"packing={options!r} names no method. Write it as in"
                " {'method': 'wlb', 'queues': 3}, or give the name alone: 'wlb'."
            )
        method = options.pop("method")
        if isinstance(method, type) and issubclass(method, Packer):
            packer = method
        else:
            packer = PACKINGS[choice("packing", method, PACKINGS)]
        check_names(f"packing {method!r}", options, [each.name for each in fields(packer.Options)])
        return PackingChoice(packer, packer.Options(**options))
