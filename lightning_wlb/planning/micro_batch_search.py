"""The ways in which one replica's pieces can become micro-batches, and a search among them.

A way is whole pieces in as few micro-batches as they need; or, for a number M of micro-batches
between half of a nominal number and sixteen times it (SlimPack §5.1), whole pieces in M, slices in
M equal MicroPacks, slices in tapered ones (:mod:`~lightning_wlb.planning.slicing`), or long pieces
cut apart from each other (:mod:`~lightning_wlb.planning.slicing`). Where the schedule runs no
slices (GPipe), there are whole pieces only.

Trying all ways would be slow. But the step's length falls with M, as the pipeline fills faster, and
then rises, as every action costs something of its own. So the search begins at six times the
nominal number with tapered micro-batches, looks at the next smaller and the next larger number, and
goes on where the step gets shorter. Where one of these plans exceeds the scorer's limit, or where
pieces cut apart make the step 1 % shorter, as they need less recomputation, it goes on from there
with such. At the M where it ends it tries the other kinds; whole pieces only where none has more
work than 1.5 micro-batches of M. What exceeds the limit is worse than all that does not, and the
more so the more it does.

Where a device is known, and an action may cost much, whole pieces are also tried as ``best_fit``
packs them: full micro-batches, and what is left in a last one, for which a pipeline waits little.

On one stage, where a device is known, whole pieces are tried in about the nominal number of
micro-batches and in fewer, which waste less time. Where these recompute, whole ones and such cut
apart are also tried in more, which need less of it. Of those within 2 % of the shortest step the
one with the fewest micro-batches is taken: a prediction is no better than that, and what every
micro-batch costs beside its model it may not know in full.

Cost: 7 to 10 ways, one more where a device is known, each O(P·log P + M·stages) for P pieces; on
one stage 4, and about ten more where memory is short. Where
times do not fall and rise so, it finds a local optimum; ``benchmarks/auto_never_beaten.py`` looks
for cases where another packing is better.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, ReplicaPlan, Slice
from lightning_wlb.planning.dealing import deal_capped, fill
from lightning_wlb.planning.plan_scoring import PlanScorer
from lightning_wlb.planning.replica_plans import Shard, replica_plan, whole
from lightning_wlb.planning.slicing import cut_apart, slice_pieces

HALVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # M over half of the nominal number
START = HALVES.index(12)
NEAR_PERCENT = 102  # of the least predicted time, in which fewer micro-batches are better

Kind = Literal["whole", "filled", "equal", "tapered", "apart"]

Packs = list[list[Slice]]
"""The slices of each micro-batch, in forward order; none where the pieces cannot be packed so."""


class Way(NamedTuple):
    """How pieces become micro-batches: of which kind, and how many."""

    kind: Kind
    halves: int  # of the nominal number; 0: as few micro-batches as the pieces need


FEWEST = Way("whole", 0)
FILLED = Way("filled", 0)


class Score(NamedTuple):
    """How good a plan is; less is better."""

    excess: int  # what a rank holds above the scorer's limit
    time: int  # of the step


def score_of(replicas: Sequence[ReplicaPlan], scorer: PlanScorer) -> Score:
    """The score of a step, or of replicas that share no micro-batch with others."""
    verdict = scorer(replicas)
    return Score(max(verdict.peak - scorer.limit, 0), verdict.time)


@dataclass
class Candidates:
    """The ways of one replica, made and judged when asked for, once each.

    Args:
        pieces: its own, at least one.
        nominal: number of micro-batches whose halves and multiples are tried, at least 1.
        cap: most tokens of a micro-batch.
        work: of forward and backward.
        mesh: for its pipeline.
        scorer: what plans are chosen by.
        shard: how micro-batches are laid out to be judged.
        slices: whether pieces may be sliced.
    """

    pieces: list[Piece]
    nominal: int
    cap: int
    work: PassWork
    mesh: Mesh
    scorer: PlanScorer
    shard: Shard
    slices: bool = True
    _packs: dict[Way, Packs] = field(default_factory=dict, init=False)
    _scores: dict[Way, Score] = field(default_factory=dict, init=False)

    def packs(self, way: Way) -> Packs:
        """The micro-batches of a way; see :data:`Packs`."""
        if way not in self._packs:
            self._packs[way] = self._make(way)
        return self._packs[way]

    def score(self, way: Way) -> Score:
        """Of the replica's step without shared pieces; the worst where they cannot be packed so."""
        if way not in self._scores:
            self._scores[way] = (
                score_of([replica_plan(self.packs(way), 0, self.shard)], self.scorer)
                if self.packs(way)
                else Score(sys.maxsize, sys.maxsize)
            )
        return self._scores[way]

    def best(self, begin: int | None = None) -> Way:
        """The way with the best score that the search finds; of equal ones whole pieces.

        Args:
            begin: index of the number of micro-batches in ``HALVES`` at which it begins.
        """
        fewest = FEWEST if self.packs(FEWEST) else Way("equal", 0)
        if self.mesh.pipeline == 1:
            if not self.scorer.longest:
                return fewest
            self._walk("whole", 1)
            if self._is_short_of_memory(min((fewest, *self._scores), key=self.score)):
                self._walk("whole", START)
                if self.slices:
                    self._walk("apart", START)
            best = min(self._scores.values())
            near = Score(best.excess, best.time * NEAR_PERCENT // 100)
            good = [way for way, score in self._scores.items() if score <= near]
            return min(good, key=lambda way: (len(self.packs(way)), self.score(way)))
        begin = START if begin is None else begin
        filled = [FILLED] if self.scorer.longest else []
        if not self.slices:
            walked = Way("whole", HALVES[self._walk("whole", begin)])
            return min((fewest, *filled, walked), key=self.score)
        # Virtual stages drain so fast that tapering gains them nothing.
        kind: Kind = "tapered" if self.mesh.virtual_stages == 1 else "equal"
        at = self._walk(kind, begin)
        reached = self.score(Way(kind, HALVES[at]))
        apart = self.score(Way("apart", HALVES[at]))
        if (
            any(score.excess for way, score in self._scores.items() if way.kind == kind)
            or apart.excess < reached.excess
            or 100 * apart.time < 99 * reached.time
        ):
            at = self._walk("apart", at)
        halves = HALVES[at]
        ways = [fewest, *filled, Way("apart", halves), Way("equal", halves), Way("tapered", halves)]
        loads = [self.work(piece.tokens) for piece in self.pieces]
        # A piece with more work would be a micro-batch that all others wait for.
        if max(loads) * self.nominal * halves <= 3 * sum(loads):
            ways.insert(1, Way("whole", halves))
        return min((*ways, *self._scores), key=self.score)

    def _is_short_of_memory(self, way: Way) -> bool:
        """Whether more micro-batches than those of a way may need less recomputation."""
        most = max(sum(part.tokens for part in pack) for pack in self.packs(way))
        return self.score(way).excess > 0 or most > self.scorer.longest[0]

    def _walk(self, kind: Kind, at: int) -> int:
        """To the neighbour with the best score while there is a better one; an index of HALVES."""
        while True:
            near = [each for each in (at, at + 1, at - 1) if 0 <= each < len(HALVES)]
            best = min(near, key=lambda each: self.score(Way(kind, HALVES[each])))
            if best == at:
                return at
            at = best

    def _make(self, way: Way) -> Packs:
        least = -(-sum(piece.tokens for piece in self.pieces) // self.cap)
        count = -(-self.nominal * way.halves // 2)
        if way.kind == "filled":
            filled = fill(self.pieces, self.cap)
            fits = max(piece.tokens for piece in self.pieces) <= self.cap
            return [list(map(whole, pieces)) for pieces in filled] if fits else []
        if way.kind == "whole":
            # Without slices as another way, search on until all fit: one each at the latest.
            most = least + 1 if self.slices else len(self.pieces)
            for bins in [count] if count else range(least, most + 1):
                dealt, left = deal_capped(self.pieces, bins, self.cap, self.work)
                if not left:
                    return [list(map(whole, pieces)) for pieces in dealt if pieces]
            return []
        taper = self.mesh.pipeline - 1 if way.kind != "equal" else 0
        cut = cut_apart if way.kind == "apart" else slice_pieces
        return cut(self.pieces, count or least, self.cap, self.work, taper=taper)


class Chosen(NamedTuple):
    """What one replica does with its own pieces."""

    candidates: Candidates
    way: Way

    @property
    def packs(self) -> Packs:
        """Its micro-batches."""
        return self.candidates.packs(self.way)

    def neighbour(self, stride: int) -> Chosen:
        """With that many steps more or fewer micro-batches; as it is where there are no such."""
        if self.way.halves == 0:
            return self
        at = min(max(HALVES.index(self.way.halves) + stride, 0), len(HALVES) - 1)
        way = self.way._replace(halves=HALVES[at])
        return Chosen(self.candidates, way) if self.candidates.packs(way) else self
