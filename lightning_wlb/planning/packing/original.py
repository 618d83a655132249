"""The packing everybody starts from: concatenate the documents and cut every C tokens.

Every micro-batch but the epoch's last has exactly the same number of tokens, so it uses memory
evenly and needs no padding; but a window that holds one long document costs several times as
much as a window of short ones. It is the baseline of WLB-LLM ("Plain-4D") and the choice for
documents that are all short against the window.

The global batches cut the stream (:func:`~lightning_wlb.planning.arrivals.cut_stream`), so that a
piece never crosses a window; :func:`pack_windows` only gathers the pieces of each window.

Cost: linear in the number of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing.base import MicroBatches, Packer
from lightning_wlb.planning.replicas import Deal, round_robin


class OriginalPacker(Packer):
    """Windows of the stream, dealt to replicas in turn."""

    cuts_stream: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100
    deal: ClassVar[Deal] = round_robin

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """A micro-batch for each window; nothing is carried."""
        return pack_windows(pieces, bins, self.rules.window), []


def pack_windows(pieces: Sequence[Piece], bins: int, window: int) -> MicroBatches:
    """Gather pieces, in the order given, into ``bins`` windows, the last ones possibly empty.

    Args:
        pieces: cut at multiples of ``window`` tokens of their concatenation.
        bins: micro-batches, N.
        window: tokens of a window, C.
    """
    micro_batches: MicroBatches = [[] for _ in range(bins)]
    taken = 0
    for piece in pieces:
        number, start = divmod(taken, window)
        assert number < bins, "more tokens than windows: too much was drawn"
        assert start + piece.tokens <= window, "a piece crosses a window: the stream was not cut"
        micro_batches[number].append(piece)
        taken += piece.tokens
    return micro_batches
