"""Best-fit-decreasing: what sample packing does elsewhere (axolotl, TRL, SlimPack's baseline).

Pieces go in descending length into the fullest micro-batch that still has room, and a new one is
opened where none has. This wastes the least memory and knows nothing of work: micro-batches of
one long document are as full as those of many short ones and cost several times as much. It is a
baseline, and the choice where work is linear in tokens.

The step has as many micro-batches as it takes, mostly one or two more than N at a cap of C and at
most 2·N, beyond which pieces are carried. They are dealt to the replicas in turn.

Cost: O(P·(log P + M)) for P pieces in M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.longest_first import fill
from lightning_wlb.planning.packing.base import MicroBatches, Packer, check_fits
from lightning_wlb.planning.replicas import Deal, round_robin


class BestFitPacker(Packer):
    """Best-fit-decreasing of each global batch, without delay."""

    cap_percent: ClassVar[int] = 100
    deal: ClassVar[Deal] = round_robin

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """As few micro-batches as best-fit finds; those beyond 2·N are carried."""
        packed = pack_best_fit(pieces, self.rules.cap)
        most = 2 * self.rules.micro_batches
        return packed[:most], [piece for left in packed[most:] for piece in left]


def pack_best_fit(pieces: Sequence[Piece], cap: int) -> MicroBatches:
    """Pieces in as many micro-batches of at most ``cap`` tokens as it takes, as they were opened.

    Equal lengths go by (document, origin), equally full micro-batches by number.

    Raises:
        ValueError: a piece is longer than ``cap``.
    """
    check_fits(pieces, cap)
    return fill(pieces, cap)
