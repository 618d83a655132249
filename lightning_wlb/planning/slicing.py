"""Pieces cut into slices, so that many small micro-batches have equal work (SlimPack §4.1).

Phase 1 of SlimPack deals whole pieces to replicas, by work
(:class:`~lightning_wlb.planning.dp_merge.Dealing`). Phase 2, :func:`slice_pieces`, fills the M
MicroPacks of each replica in turn, each to the work that is left divided by the packs left:

* a piece with more work than a pack starts in an empty pack and is cut where the target is reached
  ("slim"); its last slice leaves a gap;
* a gap is filled with whole pieces, the largest that fits first ("mix", "pack");
* only if no piece fits and more than 1/400 of the target is open, the smallest piece is cut;
* with k packs left, a pack that must take at least half of its cap so that the others can hold the
  rest first gets every k-th short piece. Else short pieces with little work for their tokens would
  all be left for the last pack, and the cap would close it before it reaches the target.

So few pieces are cut, packs that share a piece are consecutive, and mostly they share only one
long piece: its slices run forward in order and backward in reverse
(:attr:`.ReplicaPlan.backward`), and nothing else waits for them.

Work counts forward and backward together. The work of a slice is the work of the prefix up to its
end less the work of the prefix up to its start. Both are quadratic in tokens (beyond a sliding
window linear), so a cut position is the root of a quadratic, in exact integers. Positions are
rounded to whole kernel tiles (128 tokens) from the piece's origin, and no slice is shorter than 512
tokens, unless the cap forces it: each pack takes at least what the packs after it cannot hold.

The paper's packs are equal. On a pipeline of P stages the last P - 1 packs may taper, each with 5/6
of the work of the one before: the pipeline then drains sooner.

If a micro-batch ends one piece and begins the next, the slices of both form one chain, whose
backward runs in reverse as a whole: a step of such micro-batches opens all of them at once.
:func:`cut_apart` makes micro-batches in which no two slices of different pieces meet. For M
micro-batches of equal work w, a piece of k·w, k rounded to a whole number of at least 2, becomes k
slices of equal work, each in a micro-batch of its own. The other pieces stay whole and go, in
descending length, to the micro-batch with the least work, with or without a slice. Micro-batches
with slices come first, the longest piece's before the others, so that a chain never needs more
forwards than the chain before it. At most one long piece is then open on the last stage.
Micro-batches are less equal, by up to half if pieces have little more work than a micro-batch: use
it where memory is short, and for long pieces of similar length.

Cost: O(P·log P + M) searches for P pieces, and O(P·M) where the cap binds: below a millisecond for
hundreds of pieces. Do not use it for executors that keep no keys and values between micro-batches,
nor for so many packs that their kernels do not fill the device (only a scorer can see that).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from lightning_wlb.cost.attention_tiles import TILE
from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import Piece, Slice
from lightning_wlb.planning.dealing import deal_capped, longest_first
from lightning_wlb.planning.replica_plans import whole_slice
from lightning_wlb.planning.tuning import LEAST_SLICE, OPEN_GAPS, TAPER

_SHARE = 1 << 20  # relative work of a pack that is not tapered


def share_packs(loads: Sequence[int], packs: int, total: int) -> list[int]:
    """The number of packs of each replica, in proportion to its work; at least one if it has any.

    ``loads``: the work of each replica; ``total``: of all ``packs``. Rounded shares may not add up.
    """
    total = max(total, 1)
    return [max((2 * packs * load + total) // (2 * total), 1) if load else 0 for load in loads]


def slice_pieces(
    pieces: Sequence[Piece],
    packs: int,
    cap: int,
    work: PassWork,
    *,
    tile: int = TILE,
    least: int = LEAST_SLICE,
    taper: int = 0,
) -> list[list[Slice]]:
    """Phase 2: the MicroPacks of one replica.

    Args:
        pieces: the replica's pieces, in any order.
        packs: M, MicroPacks to make, at least 1. More are made where M·cap is less than the
            tokens, fewer where slices would be shorter than ``least``.
        cap: most tokens of a MicroPack.
        work: work of a piece or slice, forward and backward together.
        tile: pieces are cut at multiples of so many tokens from their origins.
        least: tokens of the shortest slice; whole pieces may be shorter.
        taper: how many last MicroPacks have 5/6 of the previous one's work; at most a quarter.

    Returns:
        The slices of each MicroPack in forward order, every token once, no pack empty. Slices of
        a piece are in order, at most one in each pack.
    """
    if not pieces:
        return []
    filling = _Filling(pieces, cap, work, tile, least)
    count = max(min(packs, filling.tokens // least), -(-filling.tokens // cap), 1)
    return [pack for pack in filling.fill(pack_shares(count, taper)) if pack]


def pack_shares(packs: int, taper: int) -> list[int]:
    """Relative work of each pack, the last ones tapered."""
    last = min(taper, packs // 4)
    before, after = TAPER
    return [_SHARE] * (packs - last) + [
        max(_SHARE * after**place // before**place, 1) for place in range(1, last + 1)
    ]


class _Waiting:
    """Pieces that are in no pack yet, ascending by length and so by work."""

    def __init__(self, pieces: Sequence[Piece], work: PassWork) -> None:
        self.pieces = longest_first(pieces)[::-1]
        self.lengths = [piece.tokens for piece in self.pieces]
        self.works = [work(tokens) for tokens in self.lengths]

    def count_fitting(self, tokens: int, work: int) -> int:
        """How many of the pieces have at most so many tokens and so much work each."""
        return min(bisect_right(self.lengths, tokens), bisect_right(self.works, work))

    def take(self, index: int) -> tuple[Piece, int, int]:
        """Remove a piece; returns it with its tokens and its work."""
        return self.pieces.pop(index), self.lengths.pop(index), self.works.pop(index)


class _Part(NamedTuple):
    """The rest of a piece, whose first tokens are in packs already."""

    piece: Piece  #: the whole piece
    placed: int  #: how many of its tokens are in packs
    at: int = -1  #: index of the piece in :class:`_Waiting` while none of it is placed; else -1


@dataclass
class _Pack:
    """The pack that is being filled."""

    room: int  #: tokens that still fit
    gap: int  #: work that is still missing; negative if it has more than its target
    slack: int  #: by how much work it may end below or above its target
    tight: bool  #: whether it must take at least half of its cap in tokens
    slices: list[Slice] = field(default_factory=list)
    open: int = -1  #: index of the slice at whose end a piece is cut; -1 if none is


class _Filling:
    """Fills the packs of one replica; the arguments are those of :func:`slice_pieces`."""

    def __init__(
        self, pieces: Sequence[Piece], cap: int, work: PassWork, tile: int, least: int
    ) -> None:
        self.cap, self.work, self.tile, self.least = cap, work, tile, least
        self.waiting = _Waiting(pieces, work)
        self.cut: _Part | None = None  # the piece that is only partly placed
        # Tokens and work that no finished pack holds.
        self.tokens = sum(self.waiting.lengths)
        self.rest = sum(self.waiting.works)

    def fill(self, shares: Sequence[int]) -> list[list[Slice]]:
        """A pack for each relative share of the work."""
        shares_left = sum(shares)
        short = self.rest * max(shares) // shares_left  # a piece with more work fills a pack
        packs = []
        for number, share in enumerate(shares):
            left = len(shares) - number
            target = self.rest * share // shares_left
            # Tokens that this pack must take, because the packs after it cannot hold them.
            owed = self.tokens - (left - 1) * self.cap
            pack = _Pack(self.cap, target, target // OPEN_GAPS, tight=2 * owed > self.cap)
            if pack.tight:
                self._sample(pack, short, left)
            self._fill_by_work(pack)
            self._take_owed(pack, owed)
            packs.append(pack.slices)
            self.rest -= target - pack.gap
            self.tokens -= self.cap - pack.room
            shares_left -= share
        return packs

    def _sample(self, pack: _Pack, most_work: int, packs_left: int) -> None:
        """Take every ``packs_left``-th short piece, so that the pack gets some of all lengths."""
        waiting = self.waiting
        longest = bisect_right(waiting.works, most_work) - 1
        for place, index in enumerate(range(longest, -1, -1), packs_left // 2):
            fits = waiting.lengths[index] <= pack.room and waiting.works[index] <= pack.gap
            if fits and place % packs_left == 0:
                self._place_whole(pack, index)

    def _fill_by_work(self, pack: _Pack) -> None:
        """Take whole pieces, or a part of one if none fits, until the pack has its work."""
        waiting = self.waiting
        while pack.gap > pack.slack and pack.room:
            part = self.cut
            if part is None:
                # Some piece waits, because work is missing.
                exceeds = waiting.works[-1] > pack.gap + pack.slack
                if exceeds and (pack.tight or not pack.slices):
                    part = self._waiting_part(len(waiting.pieces) - 1)
                elif self._pour(pack, pack.room, pack.gap, pack.slack, one=pack.tight):
                    continue
                else:
                    fitting = waiting.count_fitting(pack.room, pack.gap + pack.slack)
                    index = max(fitting, bisect_left(waiting.lengths, 2 * self.least))
                    if index == len(waiting.pieces):
                        return
                    part = self._waiting_part(index)
            stop = self._stop(pack, part)
            if stop == 0:
                return
            self._place(pack, part, stop)
            if self.cut is not None:
                return

    def _take_owed(self, pack: _Pack, owed: int) -> None:
        """Take the tokens that the packs after this one cannot hold, whatever the work."""
        while (missing := owed - (self.cap - pack.room)) > 0:
            if not self._pour(pack, missing, self.rest, 0):
                part = self.cut or self._waiting_part(0)
                self._place(pack, part, min(part.placed + missing, part.piece.tokens))

    def _pour(self, pack: _Pack, room: int, gap: int, slack: int, *, one: bool = False) -> bool:
        """Take whole pieces, each time the longest that fits; returns whether any was taken.

        Args:
            pack: the pack that takes them.
            room: most tokens to take.
            gap: work to take.
            slack: by how much the work taken may differ from ``gap``.
            one: whether to take at most one piece.
        """
        taken = False
        while gap > slack and not (one and taken):
            index = self.waiting.count_fitting(room, gap + slack) - 1
            if index < 0:
                break
            tokens, work = self._place_whole(pack, index)
            room, gap = room - tokens, gap - work
            taken = True
        return taken

    def _stop(self, pack: _Pack, part: _Part) -> int:
        """The end of the slice that fills the pack's gap; 0 if there is none.

        The slice is the rest of the piece if that fits; else it ends on a tile. Neither is short.
        """
        start, end = part.placed, part.piece.tokens
        before = self.work(start)
        if end - start <= pack.room and self.work(end) - before <= pack.gap + pack.slack:
            return end
        wanted = self.work.tokens_within(before + pack.gap) + self.tile // 2
        stop = min(wanted, end - self.least, start + pack.room) // self.tile * self.tile
        return stop if stop >= start + self.least else 0

    def _waiting_part(self, index: int) -> _Part:
        return _Part(self.waiting.pieces[index], 0, index)

    def _place_whole(self, pack: _Pack, index: int) -> tuple[int, int]:
        """Put a waiting piece into the pack; returns its tokens and its work."""
        piece, tokens, work = self.waiting.take(index)
        pack.slices.append(whole_slice(piece))
        pack.room -= tokens
        pack.gap -= work
        return tokens, work

    def _place(self, pack: _Pack, part: _Part, stop: int) -> None:
        """Put the piece's tokens from where it is placed up to ``stop`` into the pack."""
        piece, start = part.piece, part.placed
        if start == 0:
            self.waiting.take(part.at)
        made = Slice(piece.document, piece.origin, piece.origin + start, piece.origin + stop)
        if start and pack.open >= 0:  # a piece has one slice in a pack
            pack.slices[pack.open] = pack.slices[pack.open]._replace(stop=made.stop)
        else:
            if stop < piece.tokens:
                pack.open = len(pack.slices)
            pack.slices.append(made)
        pack.room -= stop - start
        pack.gap -= self.work(stop) - self.work(start)
        self.cut = _Part(piece, stop) if stop < piece.tokens else None


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
    """The micro-batches of one replica; none has slices of two pieces that were cut.

    The arguments are as in :func:`slice_pieces`, but no piece may be longer than ``cap``, the least
    length of slices is kept only roughly, and only micro-batches without slices are tapered. There
    are more than ``packs`` micro-batches if pieces do not fit, and fewer if some would be empty.

    Returns:
        The slices of each micro-batch in forward order, every token once, none empty.
    """
    if not pieces:
        return []
    order = longest_first(pieces)
    works = [work(piece.tokens) for piece in order]
    total = sum(works)
    made: list[list[Slice]] = []
    uncut: list[Piece] = []
    for piece, own in zip(order, works, strict=True):
        nearest = (2 * packs * own + total) // (2 * total)
        count = min(nearest, piece.tokens // max(least, tile))
        if count > 1:
            made += [[part] for part in _equal_slices(piece, count, work, tile)]
        else:
            uncut.append(piece)
    begun = [(work(part.tokens, part.context), part.tokens) for (part,) in made]
    # A tapered micro-batch begins with the work that it is to have less than others.
    shares = pack_shares(packs, taper)
    begun += [(total * (shares[0] - share) // sum(shares), 0) for share in shares[len(made) :]]
    while True:
        dealt, left = deal_capped(uncut, len(begun), cap, work, begun)
        if not left:
            break
        begun += [(0, 0)] * -(-sum(piece.tokens for piece in left) // cap)
    made += [[] for _ in begun[len(made) :]]
    for pack, added in zip(made, dealt, strict=True):
        pack += map(whole_slice, added)
    return [pack for pack in made if pack]


def _equal_slices(piece: Piece, count: int, work: PassWork, tile: int) -> list[Slice]:
    """``count`` slices of a piece with about equal work, fewer if cuts coincide."""
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
