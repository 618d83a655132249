"""Fixed-length packing by greed: the "Fixed-4D" baseline of WLB-LLM §3.2.

Every micro-batch has exactly C tokens, and attention work Σ d² is balanced over the micro-batches
of W global batches: pieces go in descending length to the micro-batch with the least attention
that has room. A few short pieces at the end fit nowhere whole, because the micro-batches together
have no room to spare; they are cut to fill the gaps, so that no padding is needed and nothing is
carried.

Equal tokens leave nothing to set against a long document but other long documents: at W = 1 the
imbalance degree hardly improves (1.40 of 1.43 on Generator A). It is here for comparison; choose
it only where micro-batches must have equal lengths.

Cost: O(P·(log P + W·N)) for P pieces, once every W steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing.base import Groups, longest_first
from lightning_wlb.planning.packing.windowed import WindowedPacker


class FixedGreedyPacker(WindowedPacker):
    """Greedy packing of the windows of W global batches."""

    cuts_stream: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """Micro-batches of at most C tokens; nothing is carried."""
        return pack(pieces, bins, self.rules.window), []


def pack(pieces: Sequence[Piece], bins: int, window: int) -> Groups:
    """Pieces in ``bins`` micro-batches of at most ``window`` tokens with like attention work.

    Args:
        pieces: at most ``bins`` times ``window`` tokens together, each at most ``window``.
        bins: number of micro-batches.
        window: C, tokens of a micro-batch.

    Returns:
        The groups. Equal lengths go by (document, origin), equal micro-batches by number; a piece
        that fits nowhere whole is cut, first for the micro-batch with the most room.
    """
    groups: Groups = [[] for _ in range(bins)]
    attention = [0] * bins
    room = [window] * bins
    for piece in longest_first(pieces):
        fitting = [index for index in range(bins) if room[index] >= piece.tokens]
        if fitting:
            parts = [(min(fitting, key=lambda index: (attention[index], index)), piece)]
        else:
            parts = _cut(piece, room)
        for index, part in parts:
            groups[index].append(part)
            attention[index] += part.tokens**2
            room[index] -= part.tokens
    return groups


def _cut(piece: Piece, room: Sequence[int]) -> list[tuple[int, Piece]]:
    """Pieces of a piece, each as long as the room of a micro-batch, most room first."""
    parts = []
    origin = piece.origin
    for index in sorted(range(len(room)), key=lambda index: (-room[index], index)):
        stop = min(origin + room[index], piece.stop)
        if stop == origin:
            break
        parts.append((index, Piece(piece.document, origin, stop, piece.arrival)))
        origin = stop
    assert origin == piece.stop, "more tokens than micro-batches hold"
    return parts
