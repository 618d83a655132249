"""The ways in which one replica's pieces can become micro-batches, and a search among them.

Whole pieces in as few micro-batches as they need; whole pieces in M; slices in M equal MicroPacks,
or in tapered ones (:mod:`~lightning_wlb.planning.slicing`); and, if asked for, packs for forward
and others for backward (:mod:`~lightning_wlb.planning.asymmetric`), run in units; for M at
logarithmic distances from half of a nominal number to twelve times it (SlimPack §5.1). Where the
schedule runs no slices (GPipe), whole pieces only.

Trying all of them would cost 26 simulations. But the step's length falls with M, as the pipeline
fills faster, and then rises, as every action costs something of its own. So the search begins at
six times the nominal number and goes on while the step gets shorter, first upwards; at the M where
it ends it tries the other kinds, whole pieces only where none has more work than 1.5 of M.

Cost: 5 to 8 ways, each O(P·log P + M·stages) for P pieces. On Generator A (N = 4 to 16, pipelines
of 2 to 8, interleaved or not) it finds the shortest of all ways. Not for times that do not fall and
rise so; then it finds a local optimum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_wlb.plan import Piece, ReplicaPlan, Slice
from lightning_wlb.planning.asymmetric import slice_pieces_asymmetric
from lightning_wlb.planning.judge import Judge
from lightning_wlb.planning.packing.wlb import pack
from lightning_wlb.planning.replicas import (
    Shard,
    Shared,
    asymmetric_replica_plan,
    replica_plan,
    whole,
)
from lightning_wlb.planning.slicing import PrefixWork, slice_pieces

HALVES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # M in halves of the nominal number
START = HALVES.index(12)

Kind = Literal["whole", "equal", "tapered", "units"]


class Packs(NamedTuple):
    """The slices of each micro-batch.

    Attributes:
        forward: in forward order; none where the pieces cannot be packed so.
        backward: in backward order, where these are others; else None.
    """

    forward: list[list[Slice]]
    backward: list[list[Slice]] | None = None


class Way(NamedTuple):
    """How pieces become micro-batches.

    Attributes:
        kind: what they are.
        halves: how many, in halves of the nominal number; 0: as few as the pieces need.
    """

    kind: Kind
    halves: int


FEWEST = Way("whole", 0)


class Score(NamedTuple):
    """What a plan comes to; less is better.

    Attributes:
        overflows: whether it holds more than the judge's limit.
        time: of the step.
    """

    overflows: bool
    time: int


def score_of(replicas: Sequence[ReplicaPlan], judge: Judge) -> Score:
    """The score of a step, or of replicas that share no micro-batch with others."""
    verdict = judge(replicas)
    return Score(verdict.peak > judge.limit, verdict.time)


@dataclass
class Candidates:
    """The plans of one replica.

    Args:
        pieces: its own, at least one.
        nominal: number of micro-batches that others are multiples of, at least 1.
        cap: most tokens of a micro-batch.
        work: forward and backward work of a piece's prefix.
        total: the same of whole pieces, in the unit that whole pieces are packed by.
        stages: of the pipeline.
        stages_per_rank: virtual ones of each rank.
        judge: what plans are chosen by.
        shard: how micro-batches are laid out to be judged.
        passes: forward and backward work of a piece's prefix apart, if packs of their own for
            each pass are to be tried; such a replica shares no micro-batch.
        slices: whether pieces may be sliced; else ``passes`` is None.
    """

    pieces: list[Piece]
    nominal: int
    cap: int
    work: PrefixWork
    total: Callable[[int], int]
    stages: int
    stages_per_rank: int
    judge: Judge
    shard: Shard
    passes: tuple[PrefixWork, PrefixWork] | None = None
    slices: bool = True
    _packs: dict[Way, Packs] = field(default_factory=dict, init=False)
    _scores: dict[Way, Score] = field(default_factory=dict, init=False)

    def packs(self, way: Way) -> Packs:
        """The micro-batches; none where whole pieces do not fit into so many."""
        if way not in self._packs:
            self._packs[way] = self._make(way)
        return self._packs[way]

    def score(self, way: Way) -> Score:
        """The replica's step, without what it shares with others; the worst if there is none."""
        if way not in self._scores:
            self._scores[way] = (
                score_of([self.plan(way, 0, (), self.shard)], self.judge)
                if self.packs(way).forward
                else Score(True, sys.maxsize)
            )
        return self._scores[way]

    def best(self) -> Way:
        """The way with the best score that the search finds; whole pieces among equals."""
        fewest = FEWEST if self.packs(FEWEST).forward else Way("equal", 0)
        if self.stages == 1:
            return fewest
        if not self.slices:
            return min((fewest, Way("whole", HALVES[self._walk("whole")])), key=self.score)
        # Virtual stages drain so fast that tapering gains them nothing.
        kind: Literal["equal", "tapered"] = "tapered" if self.stages_per_rank == 1 else "equal"
        halves = HALVES[self._walk(kind)]
        ways = [fewest, Way("equal", halves), Way("tapered", halves)]
        loads = [self.work(piece.tokens) for piece in self.pieces]
        # Else one of the whole pieces would make a micro-batch of its own that all wait for.
        if max(loads) * self.nominal * halves <= 3 * sum(loads):
            ways.insert(1, Way("whole", halves))
        if self.passes is not None:
            ways.append(Way("units", halves))
        return min(ways, key=self.score)

    def plan(self, way: Way, number: int, shared: Sequence[Shared], shard: Shard) -> ReplicaPlan:
        """The plan of replica ``number``, which comes first to what it shares with others."""
        forward, backward = self.packs(way)
        if backward is None:
            return replica_plan(forward, number, shard, shared)
        return asymmetric_replica_plan(forward, backward, number, shard)

    def _walk(self, kind: Literal["whole", "equal", "tapered"]) -> int:
        """From the start up while the score improves, or else down; an index of ``HALVES``."""
        at = START
        for stride in (1, -1):
            while 0 <= at + stride < len(HALVES):
                if self.score(Way(kind, HALVES[at + stride])) >= self.score(Way(kind, HALVES[at])):
                    break
                at += stride
            if at != START:
                break
        return at

    def _make(self, way: Way) -> Packs:
        least = -(-sum(piece.tokens for piece in self.pieces) // self.cap)
        count = -(-self.nominal * way.halves // 2)
        if way.kind == "whole":
            # Where slices cannot take over, search until it fits: a micro-batch per piece does.
            most = least + 1 if self.slices else len(self.pieces)
            for bins in [count] if count else range(least, most + 1):
                groups, carried = pack(self.pieces, bins, self.cap, self.total)
                if not carried:
                    return Packs([[whole(piece) for piece in group] for group in groups if group])
            return Packs([])
        if way.kind == "units":
            assert self.passes is not None
            return Packs(*slice_pieces_asymmetric(self.pieces, count, self.cap, *self.passes))
        taper = self.stages - 1 if way.kind == "tapered" else 0
        return Packs(slice_pieces(self.pieces, count or least, self.cap, self.work, taper=taper))
