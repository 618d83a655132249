"""The packing everybody starts from: concatenate the documents and cut every C tokens.

Every micro-batch but the epoch's last has exactly the same number of tokens, so it uses memory
evenly and needs no padding; but a window that holds one long document costs several times as
much as a window of short ones. It is the baseline of WLB-LLM ("Plain-4D") and the choice for
documents that are all short against the window.

The planner's sampler cuts the stream (:func:`cut_stream`), so that a piece never crosses a
window; :func:`pack` only gathers the pieces of each window.

Cost: linear in the number of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.plan import Piece
from lightning_wlb.planning.dispatch import deal_groups, round_robin
from lightning_wlb.planning.packing.base import Groups, Mesh, Packer


class OriginalPacker(Packer):
    """Windows of the stream, dealt to replicas in turn."""

    cuts_stream: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """The windows that the sampler cut."""
        return pack(pieces, bins, self.rules.window, self.rules.work)

    def arrange(self, groups: Groups, mesh: Mesh) -> list[Groups]:
        """One micro-batch to each replica in turn, in the order of the stream."""
        return deal_groups(groups, mesh.replicas, self.rules.work, round_robin)


def cut_stream(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int64],
    position: int,
    offset: int,
    tokens: int,
    window: int,
) -> tuple[list[tuple[int, int, int]], int, int]:
    """The next ``tokens`` tokens of the concatenated documents, cut every ``window`` tokens.

    Args:
        documents: document numbers in the order of the epoch.
        lengths: tokens of each document of the store, by document number.
        position: index in ``documents`` where the stream stands.
        offset: tokens of that document which are already taken.
        tokens: how many tokens to take; a multiple of ``window``.
        window: tokens of a window, C.

    Returns:
        Pieces (document, origin, stop) in stream order, and the new ``position`` and ``offset``.
        Fewer than ``tokens`` only at the epoch's end.
    """
    pieces: list[tuple[int, int, int]] = []
    taken = 0
    while taken < tokens and position < len(documents):
        document = int(documents[position])
        length = int(lengths[document])
        part = min(length - offset, window - taken % window)
        pieces.append((document, offset, offset + part))
        taken += part
        offset += part
        if offset == length:
            position, offset = position + 1, 0
    return pieces, position, offset


def pack(
    pieces: Sequence[Piece], bins: int, cap: int, work: Callable[[int], int]
) -> tuple[list[list[Piece]], list[Piece]]:
    """Gather pieces, in the order given, into windows of ``cap`` tokens.

    Args:
        pieces: pieces cut at multiples of ``cap`` tokens of their concatenation.
        bins: number of micro-batches, N.
        cap: tokens of a window, C.
        work: not used; every packing method has this signature.

    Returns:
        ``bins`` groups, the last ones empty at an epoch's end; nothing is ever carried.
    """
    groups: list[list[Piece]] = [[] for _ in range(bins)]
    taken = 0
    for piece in pieces:
        window, start = divmod(taken, cap)
        assert window < bins, "more tokens than windows: the sampler took too much"
        assert start + piece.tokens <= cap, "a piece crosses a window: the sampler did not cut it"
        groups[window].append(piece)
        taken += piece.tokens
    return groups, []
