"""SlimPack: the same pieces every step, sliced into many micro-batches of equal work.

Nothing waits: every global batch is a step. Its pieces are dealt to the replicas by work, and each
replica's are cut into MicroPacks (:mod:`~lightning_wlb.planning.slicing`), ``micro_packs`` times N
over all replicas. A piece with more work than a replica's capacity is shared by several
(:mod:`~lightning_wlb.planning.dp_merge`). On pipelines its simulated steps are much shorter than
those of ``wlb`` and ``original`` (``benchmarks/results/packing.md``). The price: keys and values of
cut pieces are kept until their last slice has run backward, and micro-batches are smaller, which a
device may run less efficiently.

With ``asymmetric=True`` forward and backward have MicroPacks of their own (§4.1.2). Attention costs
2.5 times as much backward as forward, matrix products twice, so packs with equal forward work have
unequal backward work. The forward packs are sliced for forward work. The backward packs are cut
from the same slices in the order in which backward visits them: first in, first out between pieces,
last in, first out within one. Each is filled to the backward work that is left divided by the packs
that are left. Where the next piece does not fit, the largest whole piece among those that follow
closely fills the gap; else it is cut, at a tile. The slices of the plan are the common refinement
of both cuts, and the executor runs what one forward and one backward pack share as a unit
(:mod:`~lightning_wlb.prediction.asymmetric_units`). Units are so many and so unequal that these
plans never were faster than symmetric ones in simulations (``benchmarks/results/slimpack.md``).

Cost: that of slicing; asymmetric O(P·log P + M·``LOOKAHEAD``) for P pieces in M packs, milliseconds
for hundreds of pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from lightning_wlb.argument_checks import flag, whole
from lightning_wlb.cost.attention_tiles import TILE
from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, symmetric_backward
from lightning_wlb.planning.dp_merge import merge_pieces, own_work, slice_shared
from lightning_wlb.planning.packing.base import MicroBatches, Packer, PackingOptions
from lightning_wlb.planning.plan_scoring import Placement
from lightning_wlb.planning.replica_plans import open_sharding, replica_plan
from lightning_wlb.planning.slicing import share_packs, slice_pieces
from lightning_wlb.planning.tuning import LEAST_SLICE, OPEN_GAPS

LOOKAHEAD = 128  # pieces: how far a gap's filler may be from its turn


@dataclass(frozen=True)
class SlimOptions(PackingOptions):
    """Options of ``slim``. They do not change what enters a step.

    Args:
        micro_packs: micro-batches that are made of a global batch, as a multiple of N. More fill
            the pipeline better, and make kernels smaller.
        asymmetric: whether the micro-batches of backward are cut apart from those of forward, for
            balance of each pass. Replicas then share no pieces.
    """

    micro_packs: int = 4
    asymmetric: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_packs", whole("micro_packs", self.micro_packs, 1))
        object.__setattr__(self, "asymmetric", flag("asymmetric", self.asymmetric))


class SlimPacker(Packer):
    """Slices, without delay."""

    Options: ClassVar[type[PackingOptions]] = SlimOptions
    arranges: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """All pieces in one list, because their micro-batches depend on the mesh."""
        return [pieces], []

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """Pieces dealt to replicas by work, and the MicroPacks of each."""
        rules, mesh, work = self.rules, place.mesh, self.rules.work
        options: SlimOptions = rules.options
        (pieces,) = micro_batches
        # Virtual stages and asymmetric plans cannot run shared pieces.
        shares = mesh.virtual_stages == 1 and not options.asymmetric
        merged = merge_pieces(pieces, mesh.data, work.total, int(shares))
        packs = options.micro_packs * rules.micro_batches
        counts = share_packs(own_work(merged, work.total), packs, sum(merged.loads))
        if options.asymmetric:
            return [
                asymmetric_replica_plan(
                    *slice_pieces_asymmetric(own, count, rules.cap, work.forward, work.backward),
                    number,
                    place.sharding,
                )
                for number, (own, count) in enumerate(zip(merged.own, counts, strict=True))
            ]
        shared = slice_shared(merged, packs, rules.cap, work.total)
        return [
            replica_plan(
                slice_pieces(own, count, rules.cap, work.total), number, place.sharding, shared
            )
            for number, (own, count) in enumerate(zip(merged.own, counts, strict=True))
        ]


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

    The arguments are those of :func:`~lightning_wlb.planning.slicing.slice_pieces`, with the work
    of either pass. The common refinement of both cuts may have slices shorter than ``least``.

    Returns:
        The forward packs in forward order and the backward packs in backward order, both of the
        same slices: every token in exactly one slice, and no pack empty.
    """
    first = slice_pieces(pieces, packs, cap, forward, tile=tile, least=least)
    stops = {(piece.document, piece.origin): piece.stop for piece in pieces}
    second = _Backward(first, stops, cap, backward, tile, least).packs()
    cuts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for part in (part for pack in (*first, *second) for part in pack):
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

    return list(map(refined, first)), list(map(refined, second))


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
        # Slices that are not placed yet, the next one last.
        self._stream = [slices[single.slices[0]] for single in reversed(order)]
        self._stops = stops
        self._cap, self._work, self._tile, self._least = cap, work, tile, least
        self._packs = len(forward)
        self._rest_work = sum(map(self._work_of, slices))
        self._rest_tokens = sum(part.tokens for part in slices)

    def packs(self) -> list[list[Slice]]:
        """The backward packs: at most as many as forward packs, none empty."""
        return [pack for left in range(self._packs, 0, -1) if (pack := self._fill(left))]

    def _work_of(self, part: Slice) -> int:
        return self._work(part.tokens, part.context)

    def _fill(self, left: int) -> list[Slice]:
        """Fill the next pack, when ``left`` packs are still to be filled."""
        target = self._rest_work // left
        slack = target // OPEN_GAPS
        # Tokens that this pack must take, because those after it cannot hold them.
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
            load += self._work_of(part)
            filled += part.tokens
        self._rest_work -= load
        self._rest_tokens -= filled
        return pack

    def _next(self, gap: int, slack: int, room: int, owed: int, *, fresh: bool) -> Slice | None:
        """Take the pack's next slice from the stream; None where the pack is full."""
        part = self._stream[-1]
        if part.tokens <= room and (self._work_of(part) <= gap + slack or part.tokens <= owed):
            return self._stream.pop()
        # A piece that takes several packs begins in a fresh one, which saves a cut.
        if gap > slack and room and self._untouched(part) and not (fresh and part.context):
            length = len(self._stream)
            fitting = [
                (other.tokens, index)
                for index in range(max(length - LOOKAHEAD, 0), length)
                if not (other := self._stream[index]).context
                and self._untouched(other)
                and other.tokens <= room
                and self._work_of(other) <= gap + slack
            ]
            if fitting:  # the longest, of equal ones the first in turn
                return self._stream.pop(max(fitting)[1])
        start = self._cut(part, gap, room) if gap > slack and room else part.stop
        if part.stop - start < owed:
            start = part.stop - min(owed, room)
        if start == part.stop:
            return None
        self._stream[-1] = part._replace(stop=start)
        return part._replace(start=start)

    def _cut(self, part: Slice, gap: int, room: int) -> int:
        """Where to cut the slice so that its end fills the gap; its stop if it cannot be cut."""
        end = part.stop - part.origin
        wanted = self._work.tokens_within(max(self._work(end) - gap, 0)) + self._tile // 2
        earliest = max(part.context + self._least, end - room) + self._tile - 1
        start = part.origin + max(wanted, earliest) // self._tile * self._tile
        return start if start <= part.stop - self._least else part.stop

    def _untouched(self, part: Slice) -> bool:
        """Whether the piece's backward begins with this slice, as forward cut it."""
        return part.stop == self._stops[part.document, part.origin]


def asymmetric_replica_plan(
    forward: Sequence[Sequence[Slice]],
    backward: Sequence[Sequence[Slice]],
    replica: int,
    sharding: str,
) -> ReplicaPlan:
    """The plan of a replica whose backward micro-batches group slices unlike its forward ones.

    Args:
        forward: the slices of each micro-batch, in forward order.
        backward: the same slices, in micro-batches in backward order.
        replica: number of the replica.
        sharding: as for :func:`.replica_plan`.
    """
    slices = [part for pack in forward for part in pack]
    number = {part: index for index, part in enumerate(slices)}
    passes = [
        tuple(
            MicroBatch(
                tuple(sorted(number[part] for part in pack)),
                open_sharding(sharding, pack, 1),
                0,
                (replica,),
            )
            for pack in packs
        )
        for packs in (forward, backward)
    ]
    return ReplicaPlan(tuple(slices), *passes)
