"""The packing everybody starts from: concatenate the documents and cut every C tokens.

Every micro-batch but the epoch's last has exactly the same number of tokens, so it uses memory
evenly and needs no padding; but a window that holds one long document costs several times as
much as a window of short ones. It is the baseline of WLB-LLM ("Plain-4D") and the choice for
documents that are all short against the window.

The global batches cut the stream (:func:`~lightning_wlb.planning.arrivals.cut_stream`), so that a
piece never crosses a window; :func:`pack` only gathers the pieces of each window.

Cost: linear in the number of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing.base import Groups, Packer
from lightning_wlb.planning.replicas import deal_micro_batches, round_robin


class OriginalPacker(Packer):
    """Windows of the stream, dealt to replicas in turn."""

    cuts_stream: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """The windows that the sampler cut."""
        return pack(pieces, bins, self.rules.window), []

    def arrange(self, groups: Groups, mesh: Mesh) -> list[Groups]:
        """One micro-batch to each replica in turn, in the order of the stream."""
        return deal_micro_batches(groups, mesh.data, self.rules.work.total, round_robin)


def pack(pieces: Sequence[Piece], bins: int, window: int) -> Groups:
    """Gather pieces, in the order given, into windows.

    Args:
        pieces: pieces cut at multiples of ``window`` tokens of their concatenation.
        bins: number of micro-batches, N.
        window: tokens of a window, C.

    Returns:
        ``bins`` groups, the last ones empty at an epoch's end.
    """
    groups: Groups = [[] for _ in range(bins)]
    taken = 0
    for piece in pieces:
        number, start = divmod(taken, window)
        assert number < bins, "more tokens than windows: too much was drawn"
        assert start + piece.tokens <= window, "a piece crosses a window: the stream was not cut"
        groups[number].append(piece)
        taken += piece.tokens
    return groups
