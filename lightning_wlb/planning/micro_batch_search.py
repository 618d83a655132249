"""The search of ``auto``: how many micro-batches one replica's pieces become, and of which kind.

For each number M of micro-batches between half of a nominal number and sixteen times it (SlimPack
§5.1), the candidates are whole pieces in M micro-batches, slices in M MicroPacks (tapered on plain
pipelines), and long pieces cut apart from each other (:mod:`~lightning_wlb.planning.slicing`). One
more candidate is whole pieces in as few micro-batches as they need.

Trying all would be slow. But with growing M the step first gets shorter, as the pipeline fills
faster, and then longer, as every action has an overhead. So the search begins with slices at six
times the nominal number, looks at the next smaller and the next larger number, and goes on in the
direction in which the step gets shorter. If one of these plans exceeds the memory limit, or pieces
cut apart make the step shorter, it searches on from there with pieces cut apart. At the M where it
ends it tries the other kinds, but whole pieces only if none has more work than 1.5 micro-batches.
A candidate within the limit is better than any beyond it; beyond the limit, less excess is better.

Whole pieces in few micro-batches are tried only if the best candidate so far exceeds the limit, or
if filling and draining the pipeline makes them take at most a third longer, since recomputation
could cost the others as much. With a device profile, where an action may cost much, they are also
tried as ``best_fit`` packs them: full micro-batches, and the rest in a last one that delays the
pipeline little. If these are best, whole pieces and pieces cut apart are tried in more numbers.

On one stage with a device profile, whole pieces are tried in about the nominal number of
micro-batches and fewer, which waste less time. If these need recomputation, whole pieces and pieces
cut apart are also tried in more micro-batches, which need less. Among steps within 0.3 % of the
shortest the one with the fewest micro-batches is taken, as predictions omit some overhead of each.

Cost: 4 to 9 candidates, each O(P·log P + M·stages) for P pieces; on one stage 4, and about ten more
where memory is short. If the step time has several minima over M, the search finds a local one;
``benchmarks/auto_never_beaten.py`` looks for cases where another packing is better.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import Piece, ReplicaPlan, Slice
from lightning_wlb.planning.dealing import deal_capped, fill
from lightning_wlb.planning.plan_scoring import Placement, PlanScorer
from lightning_wlb.planning.replica_plans import replica_plan, whole_slice
from lightning_wlb.planning.slicing import cut_apart, slice_pieces
from lightning_wlb.planning.tuning import HALVES, NEAR_PER_MILLE, START

Kind = Literal["whole", "filled", "sliced", "apart"]

Packs = list[list[Slice]]
"""The slices of each micro-batch, in forward order; empty if the pieces cannot be packed so."""


class Candidate(NamedTuple):
    """One way to make micro-batches of a replica's pieces.

    Attributes:
        kind: ``whole`` pieces dealt by work, or ``filled`` as by ``best_fit``; ``sliced`` into
            MicroPacks; long pieces cut ``apart`` from each other.
        halves: the number of micro-batches, in halves of the nominal number; 0: the fewest.
    """

    kind: Kind
    halves: int


FEWEST = Candidate("whole", 0)
FILLED = Candidate("filled", 0)


class Score(NamedTuple):
    """How good a plan is; less is better, and memory comes before time."""

    excess: int  # how far the fullest rank is above the scorer's limit
    time: int  # of the step


def score_of(replicas: Sequence[ReplicaPlan], scorer: PlanScorer) -> Score:
    """The score of a step, or of replicas that share no micro-batch with others."""
    time, peak = scorer(replicas)
    return Score(max(peak - scorer.limit, 0), time)


@dataclass
class MicroBatchSearch:
    """The candidates of one replica, made and scored on demand, once each."""

    pieces: list[Piece]  #: the replica's own pieces, at least one
    nominal: int  #: number of micro-batches whose halves and multiples are tried, at least 1
    cap: int  #: most tokens of a micro-batch
    work: PassWork  #: work of a piece or slice, forward and backward together
    place: Placement  #: where the pieces run, with the scorer by which plans are compared
    _packs: dict[Candidate, Packs] = field(default_factory=dict, init=False)
    _scores: dict[Candidate, Score] = field(default_factory=dict, init=False)

    def packs(self, candidate: Candidate) -> Packs:
        """The micro-batches of a candidate; empty if the pieces cannot be packed so."""
        if candidate not in self._packs:
            self._packs[candidate] = self._make(candidate)
        return self._packs[candidate]

    def score(self, candidate: Candidate) -> Score:
        """The replica's step without shared pieces; the worst score if it cannot be packed so."""
        if candidate not in self._scores:
            packs = self.packs(candidate)
            self._scores[candidate] = (
                score_of([replica_plan(packs, 0, self.place.sharding)], self.place.scorer)
                if packs
                else Score(sys.maxsize, sys.maxsize)
            )
        return self._scores[candidate]

    def best(self, begin: int | None = None) -> Candidate:
        """The candidate with the best score that the search finds; in a tie whole pieces.

        ``begin`` is the index in ``HALVES`` at which the search begins; None: ``START``.
        """
        mesh, known = self.place.mesh, bool(self.place.scorer.longest)
        fewest = FEWEST if self.packs(FEWEST) else Candidate("sliced", 0)
        if mesh.pipeline == 1:
            return self._best_on_one_stage(fewest) if known else fewest
        begin = START if begin is None else begin
        at = self._walk("sliced", begin)
        reached = self.score(Candidate("sliced", HALVES[at]))
        apart = self.score(Candidate("apart", HALVES[at]))
        if (
            any(score.excess for tried, score in self._scores.items() if tried.kind == "sliced")
            or apart.excess < reached.excess
            or apart.time < reached.time
        ):
            at = self._walk("apart", at)
        halves = HALVES[at]
        others = [Candidate("apart", halves), Candidate("sliced", halves)]
        loads = [self.work(piece.tokens) for piece in self.pieces]
        # A piece with more work than this would be a micro-batch that all others wait for.
        if max(loads) * self.nominal * halves <= 3 * sum(loads):
            others.insert(0, Candidate("whole", halves))
        best = min((*others, *self._scores), key=self.score)
        filled = [FILLED] if known else []
        # M equal micro-batches take as long on P stages as M + P - 1 of them on one.
        few, many, waits = len(self.packs(fewest)), len(self.packs(best)), mesh.pipeline - 1
        if self.score(best).excess or 3 * many * (few + waits) <= 4 * few * (many + waits):
            best = min((fewest, *filled, best), key=self.score)
        if best in filled or (known and best == fewest):
            # Slices cost too much, so also search with whole pieces, and with few slices from here.
            count = len(self.packs(best))
            at = min(range(len(HALVES)), key=lambda at: abs(HALVES[at] * self.nominal - 2 * count))
            self._walk("whole", START)
            self._walk("apart", at)
        return min((best, *self._scores), key=self.score)

    def _best_on_one_stage(self, fewest: Candidate) -> Candidate:
        self._walk("whole", 1)
        best = min((fewest, *self._scores), key=self.score)
        most = max(sum(part.tokens for part in pack) for pack in self.packs(best))
        if self.score(best).excess > 0 or most > self.place.scorer.longest[0]:
            # More micro-batches may need less recomputation.
            self._walk("whole", START)
            self._walk("apart", START)
        excess, time = min(self._scores.values())
        near = Score(excess, time * NEAR_PER_MILLE // 1000)
        good = [tried for tried, score in self._scores.items() if score <= near]
        return min(good, key=lambda tried: (len(self.packs(tried)), self.score(tried)))

    def _walk(self, kind: Kind, at: int) -> int:
        """From an index in ``HALVES``, move to the best neighbour until none is better.

        All candidates are of the given kind. A neighbour is the next number with other
        micro-batches: with few long pieces, several give the same. Returns the walk's last index.
        """
        while True:
            near = [at, *self._beside(kind, at, 1), *self._beside(kind, at, -1)]
            best = min(near, key=lambda each: self.score(Candidate(kind, HALVES[each])))
            if best == at:
                return at
            at = best

    def _beside(self, kind: Kind, at: int, stride: int) -> list[int]:
        """The next index in a direction whose micro-batches differ, if there is one."""
        packs = self.packs(Candidate(kind, HALVES[at]))
        end = len(HALVES) if stride > 0 else -1
        for index in range(at + stride, end, stride):
            if self.packs(Candidate(kind, HALVES[index])) != packs:
                return [index]
        return []

    def _make(self, candidate: Candidate) -> Packs:
        least = -(-sum(piece.tokens for piece in self.pieces) // self.cap)
        count = -(-self.nominal * candidate.halves // 2)
        if candidate.kind == "filled":
            filled = fill(self.pieces, self.cap)
            fits = max(piece.tokens for piece in self.pieces) <= self.cap
            return [list(map(whole_slice, pieces)) for pieces in filled] if fits else []
        if candidate.kind == "whole":
            # On one stage slices gain nothing, so more bins are tried until all pieces fit.
            most = least + 1 if self.place.mesh.pipeline > 1 else len(self.pieces)
            for bins in [count] if count else range(least, most + 1):
                dealt, left = deal_capped(self.pieces, bins, self.cap, self.work)
                if not left:
                    return [list(map(whole_slice, pieces)) for pieces in dealt if pieces]
            return []
        mesh = self.place.mesh
        # Virtual stages drain so fast that tapering gains them nothing.
        taper = mesh.pipeline - 1 if mesh.virtual_stages == 1 else 0
        cut = cut_apart if candidate.kind == "apart" else slice_pieces
        return cut(self.pieces, count or least, self.cap, self.work, taper=taper)


class Chosen(NamedTuple):
    """The candidate that one replica runs for its own pieces."""

    search: MicroBatchSearch
    candidate: Candidate

    def neighbour(self, stride: int) -> Chosen:
        """The same kind ``stride`` steps further in ``HALVES``, if the pieces can be packed so."""
        if self.candidate.halves == 0:
            return self
        at = min(max(HALVES.index(self.candidate.halves) + stride, 0), len(HALVES) - 1)
        candidate = self.candidate._replace(halves=HALVES[at])
        return self._replace(candidate=candidate) if self.search.packs(candidate) else self
