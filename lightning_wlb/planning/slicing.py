"""SlimPack: pieces cut into slices, so that many small micro-batches have equal work (§4.1).

Phase 1 deals whole pieces to replicas, by work
(:func:`~lightning_wlb.planning.merging.merge_pieces`). Phase 2 fills the M MicroPacks of each
replica one after another, each to the work that is left divided by the packs that are left:

* a piece with more work than a pack starts in a fresh pack and is cut where the target is reached
  ("slim"); its last slice leaves a gap;
* a gap is filled with whole pieces, the largest that fits first ("mix", "pack");
* only where none fits and more than 1/400 of the target is open, the smallest piece that does not
  fit is cut;
* where so many tokens are left that a pack must take at least half of its cap, it gets first every
  k-th of the short pieces, k packs being left. Else short pieces with little work for their tokens
  would all be left for the last pack, which the cap then closes before it reaches the target. (On
  Generator A, N = 4, at M = 2·N and the cap at C: imbalance 1.0024 on average.)

So few pieces are cut, packs that share a piece are consecutive, and mostly they share only one
long piece: its slices run forward in order and backward in reverse (:func:`~lightning_wlb.plan.
symmetric_backward`), and nothing else waits for them.

Work is that of forward and backward together. The work of a slice is that of the prefix up to its
end less that of the prefix up to its start; both are quadratic in tokens (beyond a sliding window
linear), so a cut position is the root of a quadratic, in exact integers. Positions are rounded to
whole kernel tiles (128 tokens) from the piece's origin, and no slice is shorter than 512 tokens,
unless the token cap leaves no other way: each pack takes at least the tokens that would not fit the
packs after it.

Equal packs are the paper's. Where the pipeline has P stages, P - 1 last packs that each have 5/6 of
the work of the one before drain it sooner, because nothing else runs beside their backwards: the
simulated step on Generator A is 2.5 % shorter with M = 16 and P = 4, 1.19 to 1.16 times its work,
and 3 % with M = 8. Searching all profiles of work found 0.3 % more.

Cost: O(P·log P + M) for P pieces, and O(P·M) where the cap binds; for 260 pieces in 16 packs 0.4 ms
in plain Python and 0.25 ms with numba, of which it takes 0.02 ms to fill the packs
(:mod:`~lightning_wlb.planning.filling`): the rest is the sorting of pieces and the making of
slices, one object each. Not for executors that keep no keys and values between micro-batches, nor
for so many packs that their kernels no longer fill the device: the planner cannot see that, the
simulator does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_wlb.plan import Piece, Slice
from lightning_wlb.planning.filling import UNBOUNDED, Rule, fill, prefix_work

TILE = 128  # tokens; the key tile of attention kernels
LEAST_SLICE = 512  # tokens
TAPER = (6, 5)  # a tapered pack's work to that of the one after it
_SHARE = 1 << 20  # of a pack that is not tapered


@dataclass(frozen=True)
class PrefixWork:
    """Work of the first x tokens of a piece, an integer.

    ``linear``·x + ``pair``·x·(x + 1)/2, and beyond the ``window`` of most keys that a query sees
    ``linear`` + ``pair``·``window`` for every further token.
    """

    linear: int
    pair: int
    window: int = UNBOUNDED

    @classmethod
    def of(cls, work: Callable[[int], int]) -> PrefixWork:
        """The coefficients of a cost of this form (``cost.flops.Work.total``).

        Raises:
            ValueError: if the cost has another form.
        """
        pair = work(2) - 2 * work(1)
        found = cls(work(1) - pair, pair)
        if found(UNBOUNDED) != work(UNBOUNDED):
            # The first x tokens that the window makes a difference for: one more than it.
            window = bisect_left(range(UNBOUNDED), True, key=lambda x: found(x) != work(x)) - 1
            found = replace(found, window=window)
        if found.linear < 1 or pair < 0 or any(found(x) != work(x) for x in (3, 1000, 131_072)):
            raise ValueError(
                "work is not linear·tokens + pair·(pairs of a query and a key that it sees) with"
                " linear > 0 and pair >= 0, so the work of a slice is not known. Balance on"
                " lightning_wlb.cost.flops.Work, or use a packing that does not slice."
            )
        return found

    def __call__(self, tokens: int) -> int:
        """Work of the prefix of ``tokens`` tokens."""
        return prefix_work(self.linear, self.pair, self.window, tokens)

    def position(self, work: int) -> int:
        """The most tokens whose prefix has at most ``work``."""
        return bisect_right(range(work // self.linear + 1), work, key=self) - 1


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
    if not pieces:
        return []
    ascending = descending(pieces)[::-1]
    lengths = [stop - origin for _, origin, stop, _ in ascending]
    tokens = sum(lengths)
    count = max(min(packs, tokens // least), -(-tokens // cap), 1)
    rule = Rule(work.linear, work.pair, work.window, cap, tile, least)
    made = fill(lengths, _shares(count, taper), rule)
    slices = []
    for number, start, stop in zip(made.pieces, made.starts, made.stops, strict=True):
        document, origin, _, _ = ascending[number - 1]
        slices.append(Slice(document, origin, origin + start, origin + stop))
    return [slices[first:end] for first, end in pairwise([0, *made.ends]) if first < end]


def _shares(packs: int, taper: int) -> list[int]:
    """Relative work of each pack."""
    last = min(taper, packs // 4)
    whole, part = TAPER
    return [_SHARE] * (packs - last) + [
        max(_SHARE * part**place // whole**place, 1) for place in range(1, last + 1)
    ]


def descending(pieces: Sequence[Piece]) -> list[Piece]:
    """By descending length, equal ones by (document, origin)."""
    order = sorted(pieces)
    lengths = [stop - origin for _, origin, stop, _ in order]
    # Equal lengths keep their order.
    return [order[at] for at in sorted(range(len(order)), key=lengths.__getitem__, reverse=True)]
