"""Long pieces cut apart from each other, and the others dealt whole beside their slices.

Where a micro-batch ends one piece and begins the next, their slices are one chain, whose backward
runs in reverse as a whole: a step of such micro-batches opens all of them at once. Here no two
slices of different pieces meet. For M micro-batches of equal work w, a piece of k·w, k rounded to a
whole number of at least 2, becomes k slices of equal work, each in a micro-batch of its own. All
other pieces stay whole and go, in descending length, to the micro-batch with the least work: one
that has a slice, or one of the M that have none. So at most one long piece is open on the last
stage, and nothing else waits for it.

Micro-batches with slices come first, those of the longest piece before the others, so that forwards
which a chain needs are never more than those of the chain before it. Of those without slices the
last ones are tapered (:func:`.pack_shares`).

Cost: O(P·log P + M) for P pieces. Micro-batches are less equal than those of
:mod:`~lightning_wlb.planning.slicing`, by up to half where pieces have little more work than one of
them. So it is for steps whose memory is short, and for long pieces of similar length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import Piece, Slice
from lightning_wlb.planning.longest_first import deal_capped, longest_first
from lightning_wlb.planning.slicing import LEAST_SLICE, TILE, pack_shares


def cut_apart(
    pieces: Sequence[Piece],
    packs: int,
    cap: int,
    work: PassWork,
    *,
    tile: int = TILE,
    least: int = LEAST_SLICE,
    taper: int = 0,
) -> list[list[Slice]]:
    """The micro-batches of one replica, of which none has slices of two pieces that were cut.

    Args:
        pieces: the replica's pieces, none longer than ``cap``.
        packs: M, at least 1. There are more where pieces do not fit so many, fewer where no piece
            is left for them.
        cap: most tokens of a micro-batch.
        work: of forward and backward.
        tile: cut positions are multiples of it from the piece's origin.
        least: tokens of the shortest slice, about.
        taper: how many of the last micro-batches without slices have 5/6 of the work of the one
            before.

    Returns:
        The slices of each micro-batch in forward order, every token once, none empty.
    """
    if not pieces:
        return []
    total = sum(work(piece.tokens) for piece in pieces)
    made: list[list[Slice]] = []
    whole: list[Piece] = []
    for piece in longest_first(pieces):
        nearest = (2 * packs * work(piece.tokens) + total) // (2 * total)
        count = min(nearest, piece.tokens // max(least, tile))
        if count > 1:
            made += [[part] for part in _cut(piece, count, work, tile)]
        else:
            whole.append(piece)
    begun = [(work(part.tokens, part.context), part.tokens) for (part,) in made]
    # A tapered micro-batch begins with the work that it shall not get.
    shares = pack_shares(packs, taper)
    begun += [(total * (shares[0] - share) // sum(shares), 0) for share in shares[len(made) :]]
    while True:
        dealt, left = deal_capped(whole, len(begun), cap, work, begun)
        if not left:
            break
        begun += [(0, 0)] * -(-sum(piece.tokens for piece in left) // cap)
    made += [[] for _ in begun[len(made) :]]
    for pack, of_pack in zip(made, dealt, strict=True):
        pack += [Slice(each.document, each.origin, each.origin, each.stop) for each in of_pack]
    return [pack for pack in made if pack]


def _cut(piece: Piece, count: int, work: PassWork, tile: int) -> list[Slice]:
    """Slices of about equal work."""
    total = work(piece.tokens)
    stops = [
        (work.tokens_within(total * at // count) + tile // 2) // tile * tile
        for at in range(1, count)
    ]
    cuts = sorted({0, *(min(stop, piece.tokens) for stop in stops), piece.tokens})
    return [
        Slice(piece.document, piece.origin, piece.origin + start, piece.origin + stop)
        for start, stop in pairwise(cuts)
    ]
