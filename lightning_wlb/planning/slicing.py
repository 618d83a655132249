"""SlimPack: pieces cut into slices, so that many small micro-batches have equal work (§4.1).

Phase 1 deals whole pieces to replicas, by work. Phase 2 fills the M MicroPacks of each replica one
after another, each to the work that is left divided by the packs that are left:

* a piece with more work than a pack starts in a fresh pack and is cut where the target is reached
  ("slim"); its last slice leaves a gap;
* a gap is filled with whole pieces, the largest that fits first ("mix", "pack");
* only where none fits and more than 1/400 of the target is open, the smallest piece that does not
  fit is cut;
* where packs of short pieces alone would pass the token cap before they reach the target, each
  pack gets its share of them first, and then a slice of a long piece.

So few pieces are cut, packs that share a piece are consecutive, and mostly they share only one
long piece: its slices run forward in order and backward in reverse (:func:`~lightning_wlb.plan.
symmetric_backward`), and nothing else waits for them.

Work is that of forward and backward together. The work of a slice is that of the prefix up to its
end less that of the prefix up to its start; both are quadratic in tokens, so a cut position is
the root of a quadratic, in exact integers. Positions are rounded to whole kernel tiles (128
tokens) from the piece's origin, and no slice is shorter than 512 tokens, unless the token cap
leaves no other way: each pack takes at least the tokens that would not fit the packs after it.

Equal packs are the paper's. Where the pipeline has P stages, P - 1 last packs that each have 5/6 of
the work of the one before drain it sooner, because nothing else runs beside their backwards: the
simulated step on Generator A is 2.5 % shorter with M = 16 and P = 4, 1.19 to 1.16 times its work,
and 3 % with M = 8. Searching all profiles of work found 0.3 % more.

Cost: O(P·log P + M) for P pieces; 0.4 ms in plain Python for 270 pieces. Not for executors that
keep no keys and values between micro-batches, nor for so many packs that their kernels no longer
fill the device: the planner cannot see that, the simulator does.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

from lightning_wlb.plan import Piece, Slice

TILE = 128  # tokens; the key tile of attention kernels
LEAST_SLICE = 512  # tokens
OPEN_GAPS = 400  # a gap below target / OPEN_GAPS stays open
TAPER = (6, 5)  # a tapered pack's work to that of the one after it


@dataclass(frozen=True)
class PrefixWork:
    """Work of the first x tokens of a piece: ``linear``·x + ``pair``·x·(x + 1)/2, an integer."""

    linear: int
    pair: int

    @classmethod
    def of(cls, work: Callable[[int], int]) -> PrefixWork:
        """The coefficients of a cost of this form (``cost.flops.Work.total``).

        Raises:
            ValueError: if the cost has another form.
        """
        pair = work(2) - 2 * work(1)
        found = cls(work(1) - pair, pair)
        if found.linear < 1 or pair < 0 or any(found(x) != work(x) for x in (3, 1000, 131_072)):
            raise ValueError(
                "work is not linear·tokens + pair·tokens·(tokens + 1)/2 with linear > 0 and"
                " pair >= 0, so the work of a slice is not known. Balance on"
                " lightning_wlb.cost.flops.Work, or use a packing that does not slice."
            )
        return found

    def __call__(self, tokens: int) -> int:
        """Work of the prefix of ``tokens`` tokens."""
        return self.linear * tokens + self.pair * (tokens * (tokens + 1) // 2)

    def position(self, work: int) -> int:
        """The most tokens whose prefix has at most ``work``."""
        if not self.pair:
            return work // self.linear
        double = 2 * self.linear + self.pair
        return (isqrt(double * double + 8 * self.pair * work) - double) // (2 * self.pair)


def deal_pieces(
    pieces: Sequence[Piece], replicas: int, work: Callable[[int], int]
) -> list[list[Piece]]:
    """Phase 1: whole pieces to replicas, most work first to the replica with the least so far.

    The capacity that each replica should get is Σ work / replicas. Longest first is within 1/3 of
    it at worst, and within 0.1 % where no piece is above it and short ones abound. Equal pieces
    go by (document, origin), equal replicas by number.

    Returns:
        The pieces of each replica, in descending length.
    """
    dealt: list[list[Piece]] = [[] for _ in range(replicas)]
    totals = [(0, replica) for replica in range(replicas)]
    for piece in _descending(pieces):
        total, replica = totals[0]
        dealt[replica].append(piece)
        heapq.heapreplace(totals, (total + work(piece.tokens), replica))
    return dealt


def share_packs(loads: Sequence[int], packs: int, total: int | None = None) -> list[int]:
    """M of each replica, by its work, at least one where there is any.

    Rounded half up, so the sum may differ from ``packs``.

    Args:
        loads: work of each replica.
        packs: what ``total`` is divided into.
        total: work; None: the sum of the loads.
    """
    total = max(sum(loads) if total is None else total, 1)
    return [max((2 * packs * load + total) // (2 * total), 1) if load else 0 for load in loads]


def slice_pieces(
    pieces: Sequence[Piece],
    packs: int,
    cap: int,
    work: PrefixWork,
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
        work: forward and backward work of a piece's prefix.
        tile: cut positions are multiples of it from the piece's origin.
        least: tokens of the shortest slice, but for whole pieces.
        taper: how many of the last MicroPacks each have 5/6 of the work of the one before; at
            most a quarter of them do.

    Returns:
        The slices of each MicroPack in forward order, every token once, no pack empty. Slices of
        a piece are in order, in strictly increasing packs.
    """
    tokens = sum(piece.tokens for piece in pieces)
    if not tokens:
        return []
    count = max(min(packs, tokens // least), -(-tokens // cap), 1)
    filler = _Filler(_descending(pieces), cap, work, tile, least)
    return [pack for pack in filler.fill(_shares(count, taper)) if pack]


def _shares(packs: int, taper: int) -> list[int]:
    """Relative work of each pack."""
    last = min(taper, packs // 4)
    whole, part = TAPER
    return [whole**last] * (packs - last) + [
        part**place * whole ** (last - place) for place in range(1, last + 1)
    ]


def _descending(pieces: Sequence[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-piece.tokens, piece.document, piece.origin))


class _Filler:
    """Fills one pack after another; holds the pieces that wait and the one that is cut.

    Waiting pieces are numbered 1, 2, ... by ascending length.
    """

    def __init__(
        self, descending: Sequence[Piece], cap: int, work: PrefixWork, tile: int, least: int
    ) -> None:
        self._pieces = descending[::-1]
        self._tokens = [piece.tokens for piece in self._pieces]
        self._works = [work(tokens) for tokens in self._tokens]
        # Each number's way to the nearest one that waits, itself included; the ends for none.
        self._shorter = list(range(len(descending) + 2))
        self._longer = list(range(len(descending) + 2))
        self._cap = cap
        self._work = work
        self._tile = tile
        self._least = least
        self._rest_work = sum(self._works)
        self._rest_tokens = sum(self._tokens)
        self._cut: Piece | None = None  # the piece of which only a part is placed
        self._at = 0  # where its rest begins, in tokens from its origin
        self._short = 0  # numbers up to this one have no more work than a pack
        self._short_work = 0  # of those that wait
        self._short_tokens = 0
        self._mixed = False
        self._pack: list[Slice] = []
        self._load = 0
        self._filled = 0

    def fill(self, shares: Sequence[int]) -> list[list[Slice]]:
        """A pack of each share of the work, some perhaps empty."""
        packs, total = len(shares), sum(shares)
        self._short = bisect_right(self._works, self._rest_work * max(shares) // total)
        self._short_work = sum(self._works[: self._short])
        self._short_tokens = sum(self._tokens[: self._short])
        made = []
        for number, share in enumerate(shares):
            made.append(self._fill(packs - number, self._rest_work * share // total))
            total -= share
        return made

    def _fill(self, left: int, target: int) -> list[Slice]:
        """The next pack, where ``left`` are still to be filled, this one included."""
        self._pack, self._load, self._filled = [], 0, 0
        slack = target // OPEN_GAPS
        self._mixed = self._short_tokens * target > self._cap * self._short_work
        if self._mixed:
            self._add_short(self._short_tokens // left, target)
        while self._add(target - self._load, slack):
            pass
        # What the packs after this one cannot hold, whatever its work.
        owed = self._rest_tokens - (left - 1) * self._cap
        while self._filled < owed:
            self._add_tokens(owed - self._filled)
        self._rest_work -= self._load
        self._rest_tokens -= self._filled
        return self._pack

    def _add_short(self, share: int, target: int) -> None:
        """Put up to ``share`` tokens of short pieces into the pack, and at most its work."""
        while True:
            fits = min(
                bisect_right(self._tokens, share - self._filled),
                bisect_right(self._works, target - self._load),
                self._short,
            )
            whole = self._find(self._shorter, fits)
            if not whole:
                return
            self._take(whole)

    def _add(self, gap: int, slack: int) -> bool:
        """Put one more slice into the pack; False where nothing more is to be put."""
        room = self._cap - self._filled
        if gap <= slack or not room:
            return False
        if self._cut is not None:
            return self._add_cut(gap, slack, room)
        longest = self._find(self._shorter, len(self._pieces))
        if longest == 0:
            return False
        if self._works[longest - 1] > gap + slack and (self._mixed or not self._pack):
            self._open(longest)
            return self._add_cut(gap, slack, room)
        fits = min(bisect_right(self._works, gap + slack), bisect_right(self._tokens, room))
        whole = self._find(self._shorter, fits)
        if whole:
            self._take(whole)
            return True
        cuttable = bisect_left(self._tokens, 2 * self._least)
        shortest = self._find(self._longer, max(fits, cuttable) + 1)
        if shortest > len(self._pieces):
            return False
        if self._position(self._pieces[shortest - 1], 0, gap, room):
            self._open(shortest)
            self._add_cut(gap, slack, room)
        return False

    def _add_cut(self, gap: int, slack: int, room: int) -> bool:
        """The rest of the cut piece if it fits, else what does; whether the pack may have room."""
        piece, at = self._cut, self._at
        assert piece is not None
        end = piece.tokens
        if end - at <= room and self._work(end) - self._work(at) <= gap + slack:
            self._extend(end)
            return True
        stop = self._position(piece, at, gap, room)
        if stop:
            self._extend(stop)
        return False

    def _position(self, piece: Piece, at: int, gap: int, room: int) -> int:
        """Where to cut a piece for a gap, in tokens from its origin; 0 where it cannot be."""
        wanted = self._work.position(self._work(at) + gap) + self._tile // 2
        stop = min(wanted, piece.tokens - self._least, at + room) // self._tile * self._tile
        return stop if stop >= at + self._least else 0

    def _add_tokens(self, owed: int) -> None:
        """Put up to ``owed`` more tokens into the pack, whole pieces if possible."""
        whole = self._find(self._shorter, bisect_right(self._tokens, owed))
        if whole:
            self._take(whole)
            return
        if self._cut is None:
            self._open(self._find(self._longer, 1))
        assert self._cut is not None
        self._extend(min(self._at + owed, self._cut.tokens))

    def _remove(self, number: int) -> Piece:
        self._shorter[number] = number - 1
        self._longer[number] = number + 1
        if number <= self._short:
            self._short_work -= self._works[number - 1]
            self._short_tokens -= self._tokens[number - 1]
        return self._pieces[number - 1]

    def _take(self, number: int) -> None:
        """Put a waiting piece into the pack, whole."""
        piece = self._remove(number)
        self._pack.append(Slice(piece.document, piece.origin, piece.origin, piece.stop))
        self._load += self._works[number - 1]
        self._filled += piece.tokens

    def _open(self, number: int) -> None:
        """Make a waiting piece the one that is cut."""
        self._cut, self._at = self._remove(number), 0

    def _extend(self, stop: int) -> None:
        """Put the cut piece's tokens up to ``stop`` into the pack, in one slice per pack."""
        piece, at = self._cut, self._at
        assert piece is not None
        start, end = piece.origin + at, piece.origin + stop
        for place, earlier in enumerate(self._pack):
            if earlier[:2] == piece[:2]:
                self._pack[place] = earlier._replace(stop=end)
                break
        else:
            self._pack.append(Slice(piece.document, piece.origin, start, end))
        self._load += self._work(stop) - self._work(at)
        self._filled += stop - at
        self._at = stop
        if stop == piece.tokens:
            self._cut = None

    @staticmethod
    def _find(way: list[int], number: int) -> int:
        """Follow the way from ``number`` to its end, and shorten it."""
        end = number
        while way[end] != end:
            end = way[end]
        while way[number] != end:
            way[number], number = end, way[number]
        return end
