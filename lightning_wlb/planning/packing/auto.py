"""Chooses each step's plan by simulation: whole pieces or slices, and how many micro-batches.

The pieces of a step are dealt to the replicas by work. For each replica's pieces a search
(:mod:`~lightning_wlb.planning.micro_batch_search`) finds the kind and number of micro-batches, its
*candidate*, with the shortest simulated step among those that fit: in the device's memory if that
is known, else with no more tokens open than 1F1B has with full micro-batches. The replica with the
most work searches first, and the others take its candidate. While the latest replica would end
later than all that have searched (with many replicas: clearly later), it takes the best candidate
found so far, or searches itself if it has that already.

If dealing whole pieces leaves one replica with 2 % more work than the mean, or on pipelines lets
one end later than the mean by more than sharing costs, several replicas may share a piece
(:mod:`~lightning_wlb.planning.dp_merge`). The simulator chooses which pieces are shared: none, or
those above a replica's capacity, or above a half, a quarter or an eighth of it. The number of
unshared micro-batches is then chosen once more, by the whole step. If memory is known, pieces that
one replica cannot hold, however much it recomputes, are always shared by as many as they need.

Times are predicted from a device profile if the planner has one (``Planner(scorer=...)``). Without
one they are exact work, and every action also takes the forward work of a piece of 1 % of a context
window; this overhead bounds the number of micro-batches. Predicted times are not proportional to
work. So if some replica ends 1 % later than the mean, pieces are dealt again, up to twice, with
less work for the late replicas. The longest pieces and the candidates are kept where possible. This
is done for the two best dealings, and for others that may become better than those.

No pieces wait for later steps. On one stage there is no bubble to fill, so pieces stay whole, in as
few micro-batches as the cap allows. If memory is known there and the user gave no cap,
micro-batches may be as long as memory allows, several numbers of them are tried, and pieces that no
replica can hold without recomputation may also be shared.

Cost, in plans scored: a search (4 to 9) for the first replica and for each that searches again, 1
or 2 for the others; the same for each further dealing, and one to four of the whole step. On one
stage where memory is short there are up to fifteen dealings. That is milliseconds for hundreds of
pieces (``benchmarks/results/packing.md``), several times that with a device profile. On thousands
of ranks it is most of a plan's time (``docs/scale.md``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning import tuning
from lightning_wlb.planning.dp_merge import Dealing, Merged, most_sharers, own_work, slice_shared
from lightning_wlb.planning.micro_batch_search import (
    Candidate,
    Chosen,
    MicroBatchSearch,
    Score,
    score_of,
)
from lightning_wlb.planning.packing.base import MicroBatches, Packer
from lightning_wlb.planning.plan_scoring import Placement
from lightning_wlb.planning.replica_plans import Shared, replica_plan
from lightning_wlb.planning.slicing import share_packs


class AutoPacker(Packer):
    """Slices and whole pieces, chosen by simulation."""

    compares_plans: ClassVar[bool] = True
    arranges: ClassVar[bool] = True

    def cap(self, place: Placement) -> int:
        """The user's cap or C; on one stage, if the user gave none, what memory holds."""
        cap = self.rules.cap
        if place.mesh.pipeline > 1 or self.rules.cap_is_given:
            return cap
        return max(cap, *place.scorer.longest, 0)

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """The dealing, with or without shared pieces, whose simulated step is shortest."""
        (pieces,) = micro_batches
        work, mesh = self.rules.work, place.mesh
        first = Dealing(pieces, mesh.data, work.total, sharers=most_sharers(work, mesh))
        # Virtual stages cannot run shared pieces.
        if mesh.virtual_stages > 1:
            return self._evened(self._made(first, place), place).plans
        first = replace(first, most_tokens=max(place.scorer.longest, default=sys.maxsize))
        begun = self._refined(self._made(first, place), place)
        found = [begun] + [
            self._refined(self._made(each, place), place) for each in self._sharing(begun, place)
        ]
        found.sort(key=lambda made: made.score)
        best = found[0]
        for at, each in enumerate(found):
            # Which dealing is best once it is dealt again is not known before.
            if at < tuning.EVENED or self._evened_at_best(each, place) < best.score:
                best = min(best, self._evened(each, place), key=lambda made: made.score)
        return best.plans

    def _evened_at_best(self, made: _Made, place: Placement) -> Score:
        """An optimistic estimate of the score after :meth:`_evened`.

        The step takes at least the mean of the replicas' ends, and at least as long as any replica
        takes with only the pieces that it shares and the longest of its own.
        """
        ends = place.scorer.ends(made.plans)
        merged, work = made.dealing.merged, self.rules.work.total
        if not ends:
            return made.score
        least = [sum(ends) // len(ends)]
        for end, load, own in zip(ends, merged.loads, merged.own, strict=True):
            works = [work(piece.tokens) for piece in own]
            least.append(end * (load - sum(works) + max(works, default=0)) // max(load, 1))
        return made.score._replace(time=max(least))

    def _evened(self, best: _Made, place: Placement) -> _Made:
        """Deal again, with less work for late replicas, as long as the step gets shorter."""
        for _ in range(tuning.DEALT_AGAIN):
            ends = place.scorer.ends(best.plans)
            if 100 * len(ends) * max(ends, default=0) <= tuning.LATE_PERCENT * sum(ends):
                break
            again = self._made(best.dealing.again(ends), place, best.own)
            if again.score >= best.score:
                break
            best = again
        return best

    def _sharing(self, first: _Made, place: Placement) -> Iterator[Dealing]:
        """Dealings that share more pieces than the first, if the first leaves replicas behind."""
        mesh, scorer, fewest = place.mesh, place.scorer, first.dealing
        loads, ends = fewest.merged.loads, scorer.ends(first.plans)
        longest = max((piece.tokens for piece in fewest.pieces), default=0)
        by_memory = mesh.pipeline == 1 and any(tokens < longest for tokens in scorer.longest)
        uneven = 100 * len(loads) * max(loads) > tuning.UNBALANCED_PERCENT * sum(loads)
        late = mesh.pipeline > 1 and 100 * len(ends) * max(ends, default=0) > (
            100 + tuning.SHARING_OVERHEAD_PERCENT
        ) * sum(ends)
        if not (by_memory or uneven or late):
            return
        seen = [fewest.merged]
        thresholds = (0, 1) if by_memory and mesh.data > tuning.MANY_REPLICAS else (0, 1, 2, 4, 8)
        # A piece that several replicas hold together needs less recomputation.
        for most_tokens in scorer.longest if by_memory else [fewest.most_tokens]:
            for per_capacity in thresholds if by_memory or uneven else (1, 2):
                dealing = replace(fewest, per_capacity=per_capacity, most_tokens=most_tokens)
                merged = dealing.merged
                evener = max(merged.loads) < max(seen[-1].loads)
                if merged not in seen and (by_memory or late or evener):
                    seen.append(merged)
                    yield dealing

    def _made(
        self, dealing: Dealing, place: Placement, before: Sequence[Chosen | None] = ()
    ) -> _Made:
        """The plans of a dealing, with the best of several ways to slice what is shared."""
        merged, cap, stages = dealing.merged, self.cap(place), place.mesh.pipeline
        # A replica without a micro-batch for each stage cannot fill its pipeline.
        count = max(self.rules.micro_batches, stages * place.mesh.data)
        own = self._own(merged, count, place, before)
        made = []
        for multiple in tuning.SHARED_MULTIPLES if stages > 1 and merged.shared else (0,):
            shared = slice_shared(merged, multiple * count, cap, self.rules.work.total)
            plans = _plans(own, shared, place.sharding)
            made.append(_Made(score_of(plans, place.scorer), dealing, own, shared, plans))
        return min(made, key=lambda each: each.score)

    def _refined(self, made: _Made, place: Placement) -> _Made:
        """The same plans with fewer or more unshared micro-batches, while the step gets shorter."""
        if not made.shared or place.mesh.pipeline == 1:
            return made
        for stride in (-1, 1):
            while True:
                own = [chosen and chosen.neighbour(stride) for chosen in made.own]
                plans = _plans(own, made.shared, place.sharding)
                score = score_of(plans, place.scorer)
                if score >= made.score:
                    break
                made = made._replace(score=score, own=own, plans=plans)
        return made

    def _own(
        self, merged: Merged, count: int, place: Placement, before: Sequence[Chosen | None]
    ) -> list[Chosen | None]:
        """The candidate for each replica's own pieces; ``count`` is the nominal number over all.

        Candidates are chosen without the shared pieces, whose time does not depend on the choice.
        Replicas begin with the candidates of the dealing ``before``, if there was one.
        """
        work = self.rules.work.total
        loads = own_work(merged, work)
        nominal = share_packs(loads, count, sum(merged.loads))
        cap = self.cap(place)
        searches = {
            number: MicroBatchSearch(own, nominal[number], cap, work, place)
            for number, own in enumerate(merged.own)
            if own
        }
        if not searches:
            return [None] * len(loads)
        searched: set[int] = set()
        found: list[Candidate] = []
        ways = {number: each.candidate for number, each in enumerate(before) if each}
        if not ways:
            first = max(searches, key=lambda number: loads[number])
            found.append(searches[first].best())
            searched.add(first)
        usual = next(iter([*found, *ways.values()]))
        chosen = {
            number: Chosen(search, ways.get(number, usual)) for number, search in searches.items()
        }
        # With shared pieces the replica with the most work of its own may not be the latest.
        by_load = merged.shared and place.mesh.pipeline == 1

        def lateness(number: int) -> Score:
            search, way = chosen[number]
            excess, time = search.score(way)
            return Score(excess, time * max(loads) // loads[number] if by_load else time)

        slack = tuning.SLACK_PER_MILLE if len(loads) > tuning.SELF_SEARCHING else 1000
        while (latest := max(chosen, key=lateness)) not in searched:
            most = max(map(lateness, searched), default=Score(0, 0))
            if lateness(latest) <= Score(most.excess, most.time * slack // 1000):
                break
            search, current = chosen[latest]
            way = min((current, *found), key=search.score)
            if way == current:
                way = search.best(tuning.HALVES.index(way.halves) if way.halves else None)
                found.append(way)
                searched.add(latest)
            chosen[latest] = Chosen(search, way)
        return [chosen.get(number) for number in range(len(loads))]


class _Made(NamedTuple):
    """The plans made from a dealing, and their score."""

    score: Score
    dealing: Dealing
    own: list[Chosen | None]
    shared: list[Shared]
    plans: list[ReplicaPlan]


def _plans(own: list[Chosen | None], shared: list[Shared], sharding: str) -> list[ReplicaPlan]:
    return [
        replica_plan(each.search.packs(each.candidate) if each else [], number, sharding, shared)
        for number, each in enumerate(own)
    ]
