"""The packings that others are compared with: ``original`` and ``best_fit``.

``original`` concatenates the documents and cuts every C tokens ("Plain-4D" in WLB-LLM). Every
micro-batch but the epoch's last has exactly C tokens, so memory is even and nothing is padded; but
a window that holds one long document costs several times as much as a window of short ones. Use it
where all documents are much shorter than the window.

``best_fit`` is best-fit-decreasing, the sample packing of axolotl and TRL and SlimPack's baseline:
pieces go in descending length into the fullest micro-batch that still has room, or into a new one
if none has. It wastes the least memory and ignores work. A step has as many micro-batches as this
opens, mostly one or two more than N at a cap of C. It has at most 2·N; further pieces are carried.

Cost for P pieces in M micro-batches: ``original`` O(P), ``best_fit`` O(P·(log P + M)).
"""

from __future__ import annotations

from typing import ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.dealing import Deal, fill, round_robin
from lightning_wlb.planning.packing.base import MicroBatches, Packer


class OriginalPacker(Packer):
    """Windows of C tokens of the stream, dealt to replicas in turn."""

    cuts_stream: ClassVar[bool] = True
    deal: ClassVar[Deal] = round_robin

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """One micro-batch for each window, the last ones possibly empty; nothing is carried."""
        micro_batches: MicroBatches = [[] for _ in range(bins)]
        taken, window = 0, self.rules.window
        for piece in pieces:
            number, start = divmod(taken, window)
            assert number < bins, "more tokens than windows: too much was drawn"
            assert start + piece.tokens <= window, "a piece crosses a window: it was not cut there"
            micro_batches[number].append(piece)
            taken += piece.tokens
        return micro_batches, []


class BestFitPacker(Packer):
    """Best-fit-decreasing of each global batch, without delay."""

    deal: ClassVar[Deal] = round_robin

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """The micro-batches of best-fit, at most 2·N; pieces of any further ones are carried."""
        packed = fill(pieces, self.rules.cap)
        most = 2 * self.rules.micro_batches
        return packed[:most], [piece for left in packed[most:] for piece in left]
