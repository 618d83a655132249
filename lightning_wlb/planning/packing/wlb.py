"""Variable-length packing by work: the greedy of WLB-LLM Algorithm 1 (lines 16-28).

Pieces go in descending length to the micro-batch with the least work; where that would pass the
cap, to the micro-batch with the fewest tokens; where that would pass it too, the piece is carried
to the next step. Short pieces come last and even out what the long ones left, so micro-batches
end with equal work and unequal length.

Two departures from the listing as printed (docs/design.md, section 7): a piece may fill a
micro-batch exactly (``<=`` for L_max, or a document of length L_max would wait for ever), and
the carried pieces are those of this step only.

Cost: O(P·log P + P·log N) for P pieces in N micro-batches; 0.6 ms for 300 pieces. Not for a cap
of C: without room above the window it can not add short documents beside long ones, and the
carried list grows until the epoch's drain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from lightning_wlb.plan import Piece


def pack(
    pieces: Sequence[Piece], bins: int, cap: int, work: Callable[[int], int]
) -> tuple[list[list[Piece]], list[Piece]]:
    """Deal pieces to micro-batches of nearly equal work.

    Args:
        pieces: what may enter the step.
        bins: number of micro-batches, N.
        cap: most tokens of a micro-batch, L_max.
        work: cost of a piece from its tokens, an integer.

    Returns:
        ``bins`` groups, each with its pieces in the order in which they were added (some may be
        empty), and the pieces that did not fit. Equal lengths go by (document, origin), equal
        bins by number.

    Raises:
        ValueError: a piece is longer than ``cap``.
    """
    order = sorted(pieces, key=lambda piece: (-piece.tokens, piece.document, piece.origin))
    if order and order[0].tokens > cap:
        piece = order[0]
        raise ValueError(
            f"The piece [{piece.origin}, {piece.stop}) of document {piece.document} has"
            f" {piece.tokens} tokens, more than the cap of {cap} tokens of a micro-batch. Raise"
            " the cap, or lower the context window, which bounds a piece."
        )
    groups: list[list[Piece]] = [[] for _ in range(bins)]
    carried: list[Piece] = []
    loads = [0] * bins
    tokens = [0] * bins
    # A heap entry is stale once its bin has grown; it is dropped when it comes to the top.
    by_load = [(0, index) for index in range(bins)]
    by_tokens = [(0, index) for index in range(bins)]
    for piece in order:
        while by_load[0][0] != loads[by_load[0][1]]:
            heapq.heappop(by_load)
        while by_tokens[0][0] != tokens[by_tokens[0][1]]:
            heapq.heappop(by_tokens)
        length = piece.tokens
        chosen = by_load[0][1]
        if tokens[chosen] + length > cap:
            chosen = by_tokens[0][1]
            if tokens[chosen] + length > cap:
                carried.append(piece)
                continue
        groups[chosen].append(piece)
        loads[chosen] += work(length)
        tokens[chosen] += length
        heapq.heappush(by_load, (loads[chosen], chosen))
        heapq.heappush(by_tokens, (tokens[chosen], chosen))
    return groups, carried
