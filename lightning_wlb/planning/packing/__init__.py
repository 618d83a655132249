"""Packing methods: one file each, and one line here that registers it.

A packing method says how the documents of an epoch are cut into pieces, which of them may wait,
how the pieces of a step are grouped into micro-batches, and how these are dealt to replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_wlb.plan import Piece
from lightning_wlb.planning.dispatch import Deal, longest_first, round_robin
from lightning_wlb.planning.packing import original, wlb

Pack = Callable[
    [Sequence[Piece], int, int, Callable[[int], int]], tuple[list[list[Piece]], list[Piece]]
]


@dataclass(frozen=True)
class PackingMethod:
    """How one method turns documents into micro-batches.

    Args:
        pack: ``(pieces, bins, cap, work) -> (groups, carried)``, pure: ``bins`` groups of at
            most ``cap`` tokens, and what did not fit.
        deal: ``(work of each group, replicas) -> group indices of each replica``.
        cuts_stream: whether the concatenated documents are cut at every C tokens, so that a step
            has exactly N windows, and groups are bounded by C. Else documents stay whole up to C.
        delays: whether long pieces wait in outlier queues.
        cap_percent: the cap where the user gives none, in percent of C.
    """

    pack: Pack
    deal: Deal
    cuts_stream: bool
    delays: bool
    cap_percent: int


PACKINGS: dict[str, PackingMethod] = {
    "original": PackingMethod(original.pack, round_robin, True, False, 100),
    "wlb": PackingMethod(wlb.pack, longest_first, False, True, 150),
}
