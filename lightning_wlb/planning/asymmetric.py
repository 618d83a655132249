"""Backward MicroPacks of their own: forward and backward balanced apart (SlimPack §4.1.2).

Attention costs 2.5 times as much backward as forward, matrix products twice, so packs with equal
forward work have unequal backward work. Here the forward packs are those of
:func:`~lightning_wlb.planning.slicing.slice_pieces` for forward work, and the backward packs are
cut from the same slices in the order in which backward visits them: first in, first out between
pieces, last in, first out within one. Each is filled to the backward work that is left divided by
the packs that are left. Where the next piece does not fit, the largest whole piece among those
that follow closely fills the gap; else it is cut, at a tile.

The common refinement of both cuts is the plan's slices. Symmetric packs are balanced in the sum of
both passes already, so packs of their own can gain little: 0.2 to 0.5 % of a step on Generator A
if packs ran whole in both passes (``benchmarks/slimpack.py``). The executor runs what one forward
and one backward pack share as a unit (:mod:`~lightning_wlb.prediction.executed`); units are many
and unequal, and a plan in units is slower there than a symmetric one by 13 to 32 %. So no packing
makes these plans unless it is asked to (``{"method": "slim", "asymmetric": True}``).

Cost: O(P log P + M·A) for P pieces in M packs, with A pieces looked ahead: 3 ms in plain Python
for 200 pieces in 16 packs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import MicroBatch, Piece, Slice, symmetric_backward
from lightning_wlb.planning.slicing import LEAST_SLICE, OPEN_GAPS, TILE, slice_pieces

AHEAD = 128  # pieces: how far a gap's filler may be from its turn


def slice_pieces_asymmetric(
    pieces: Sequence[Piece],
    packs: int,
    cap: int,
    forward: PassWork,
    backward: PassWork,
    *,
    tile: int = TILE,
    least: int = LEAST_SLICE,
) -> tuple[list[list[Slice]], list[list[Slice]]]:
    """The MicroPacks of one replica, for forward and for backward.

    Args:
        pieces: the replica's pieces, in any order.
        packs: MicroPacks of either pass, as for ``slice_pieces``.
        cap: most tokens of a MicroPack.
        forward: forward work of a piece's prefix.
        backward: its backward work.
        tile: cut positions are multiples of it from the piece's origin.
        least: tokens of the shortest slice that either cut makes, but for whole pieces. Their
            refinement may have shorter ones.

    Returns:
        The forward packs in forward order and the backward packs in backward order, both of the
        same slices: every token in exactly one slice, and no pack empty.
    """
    made = slice_pieces(pieces, packs, cap, forward, tile=tile, least=least)
    stops = {(piece.document, piece.origin): piece.stop for piece in pieces}
    groups = _Backward(made, stops, cap, backward, tile, least).groups(len(made))
    cuts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for part in (part for pack in (*made, *groups) for part in pack):
        cuts[part.document, part.origin].update((part.start, part.stop))

    def refined(pack: Sequence[Slice]) -> list[Slice]:
        result = []
        for part in pack:
            inner = sorted(
                cut for cut in cuts[part.document, part.origin] if part.start <= cut <= part.stop
            )
            result += [
                Slice(part.document, part.origin, start, stop) for start, stop in pairwise(inner)
            ]
        return result

    return [refined(pack) for pack in made], [refined(group) for group in groups]


class _Backward:
    """Cuts the backward order of forward packs into packs of equal backward work."""

    def __init__(
        self,
        forward: Sequence[Sequence[Slice]],
        stops: dict[tuple[int, int], int],
        cap: int,
        work: PassWork,
        tile: int,
        least: int,
    ) -> None:
        slices = [part for pack in forward for part in pack]
        singles = [MicroBatch((index,), "", 0, (0,)) for index in range(len(slices))]
        order = symmetric_backward(slices, singles)
        # What still has to be placed, the next one last.
        self._stream = [slices[single.slices[0]] for single in reversed(order)]
        self._stops = stops
        self._cap, self._work, self._tile, self._least = cap, work, tile, least
        self._rest_work = sum(map(self._of, slices))
        self._rest_tokens = sum(part.tokens for part in slices)

    def groups(self, count: int) -> list[list[Slice]]:
        """``count`` packs at most, none empty."""
        made = (self._group(left) for left in range(count, 0, -1))
        return [group for group in made if group]

    def _of(self, part: Slice) -> int:
        return self._work(part.stop - part.origin) - self._work(part.context)

    def _group(self, left: int) -> list[Slice]:
        target = self._rest_work // left
        slack = target // OPEN_GAPS
        # What the packs after this one cannot hold.
        owed = self._rest_tokens - (left - 1) * self._cap
        pack: list[Slice] = []
        load = filled = 0
        while self._stream:
            gap = target - load if left > 1 else self._rest_work
            room = self._cap - filled
            part = self._next(gap, slack, room, max(owed - filled, 0), fresh=not pack)
            if part is None:
                break
            pack.append(part)
            load += self._of(part)
            filled += part.tokens
        self._rest_work -= load
        self._rest_tokens -= filled
        return pack

    def _next(self, gap: int, slack: int, room: int, owed: int, *, fresh: bool) -> Slice | None:
        """Take from the stream what the pack gets next; None where it gets nothing more."""
        part = self._stream[-1]
        if part.tokens <= room and (self._of(part) <= gap + slack or part.tokens <= owed):
            return self._stream.pop()
        # A piece that takes several packs had better begin in a fresh one: that saves a cut.
        if gap > slack and room and self._untouched(part) and not (fresh and part.context):
            best = -1
            for index in range(len(self._stream) - 1, max(len(self._stream) - AHEAD, 0) - 1, -1):
                other = self._stream[index]
                if (
                    self._is_whole(other)
                    and other.tokens <= room
                    and self._of(other) <= gap + slack
                    and (best < 0 or other.tokens > self._stream[best].tokens)
                ):
                    best = index
            if best >= 0:
                return self._stream.pop(best)
        start = self._cut(part, gap, room) if gap > slack and room else part.stop
        if part.stop - start < owed:
            start = part.stop - min(owed, room)
        if start == part.stop:
            return None
        self._stream[-1] = part._replace(stop=start)
        return part._replace(start=start)

    def _cut(self, part: Slice, gap: int, room: int) -> int:
        """Where the end of the slice begins that fills the gap; its stop where it cannot be cut."""
        end = part.stop - part.origin
        wanted = self._work.tokens_within(max(self._work(end) - gap, 0)) + self._tile // 2
        earliest = max(part.context + self._least, end - room) + self._tile - 1
        start = part.origin + max(wanted, earliest) // self._tile * self._tile
        return start if start <= part.stop - self._least else part.stop

    def _is_whole(self, part: Slice) -> bool:
        return not part.context and self._untouched(part)

    def _untouched(self, part: Slice) -> bool:
        """Whether the piece's backward begins with this slice, as forward cut it."""
        return part.stop == self._stops[part.document, part.origin]
