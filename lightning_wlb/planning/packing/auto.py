"""Whatever the simulator finds fastest, step by step: whole pieces or slices, and how many.

The pieces of a step are dealt to the replicas by work, and each replica's become micro-batches in
the way whose simulated step is shortest (:mod:`~lightning_wlb.planning.candidates`), of those that
fit: in the device's memory where that is known, else with no more tokens open than 1F1B has with
full micro-batches. The replica with the most work searches first. What suits it is taken for every
other one that it makes no later than the latest so far; only a replica that would be later searches
for itself.

Where dealing whole pieces to the replicas leaves one with 2 % more work than the mean, pieces may
be shared by several (:mod:`~lightning_wlb.planning.merging`): those above a replica's capacity, or
above a half, a quarter or an eighth of it, whatever the simulator finds fastest, or none.

Times are predicted from a device profile if the planner has one (``Planner(judge=...)``); else they
are exact work, and an action's overhead, which is what bounds the number of micro-batches, is the
forward of 1 % of a context window of short documents.

What enters a step does not depend on the mesh, so it is not for the simulator to choose. Slices
leave a pipeline nothing to wait for: in simulations of Generator A (N = 4, four stages) holding
long pieces back gained nothing. They wait, as in ``tapered``, only where they have more work than a
fair share of ``nominal_replicas``, a data setting, and only under ``delay_budget``. With one
nominal replica, the default, nothing waits but what would make a step twice as long as nominal. On
16 replicas of one stage each (N = 16) a step takes 1.027 times its work with
``nominal_replicas=16``, at a mean delay of 0.16 steps, and 1.034 without delay; ``tapered``, which
shares no pieces, takes 1.132 at 0.21, ``balanced`` 1.117 at 0.26 and ``wlb`` 1.066 at 0.66
(``benchmarks/results/packing.md``, simulated, sharing taken to cost 10 %).

On a pipeline of one stage it packs whole pieces, as few micro-batches as the cap allows: there is
no bubble to fill. Where the schedule runs no slices (GPipe), all pieces stay whole and none is
shared.

Cost: 5 to 8 simulations per step, and one more for each further replica and dealing. CPU time of a
step in plain Python (Generator A, C = 128K, four stages): 8 ms for N = 4 (200 pieces), 53 ms for N
= 16 (830 pieces), of the packing alone (``benchmarks/results/packing.md``). A device profile beside
context parallelism costs more, as every candidate's sharding is chosen: 320 ms for N = 4 on four
stages × CP 2. The data loader plans ahead of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.candidates import FEWEST, Candidates, Score, Way, score_of
from lightning_wlb.planning.judge import Judge, PipelineJudge
from lightning_wlb.planning.merging import Merged, merge_pieces
from lightning_wlb.planning.packing.base import Groups, Mesh, Rules
from lightning_wlb.planning.packing.slim import own_work, slice_shared
from lightning_wlb.planning.packing.tapered import TaperedPacker
from lightning_wlb.planning.replicas import Shard, Shared, replica_plan, sharded, unsharded
from lightning_wlb.planning.slicing import PrefixWork, share_packs

SHARED = (2, 4, 8)  # MicroPacks of shared pieces are as long as so many times N over the step
UNBALANCED_PERCENT = 102  # work of the busiest replica to the mean above which pieces are shared
OVERHEAD = 100  # an action costs the forward of a short piece of C / OVERHEAD tokens

Chosen = tuple[Candidates, Way] | None
"""What a replica runs of its own; None: nothing."""


class AutoPacker(TaperedPacker):
    """Slices and whole pieces, chosen by simulation; the release of tapered, for one stage."""

    reads: ClassVar[tuple[str, ...]] = ("delay_budget", "max_age", "nominal_replicas")

    def __init__(self, rules: Rules) -> None:
        super().__init__(replace(rules, nominal_stages=1))
        self._prefix_work = work = PrefixWork.of(rules.work)
        self._passes: tuple[PrefixWork, PrefixWork] | None = None
        if rules.asymmetric:
            forward = PrefixWork.of(rules.forward)
            backward = replace(
                work, linear=work.linear - forward.linear, pair=work.pair - forward.pair
            )
            # A planner that was not told the forward's part takes both passes to be alike.
            self._passes = forward, backward if backward.linear else forward

    def replicas(self, groups: Groups, mesh: Mesh, shard: Shard) -> list[ReplicaPlan]:
        """The dealing, with or without shared pieces, whose simulated step is shortest."""
        judge = self._judge(mesh)
        layout = shard if judge.sees_sharding else unsharded
        pieces = [piece for group in groups for piece in group]
        # A replica without a micro-batch for each stage cannot fill its pipeline.
        count = max(self.rules.micro_batches, mesh.stages * mesh.replicas)
        best: Score | None = None
        chosen: list[ReplicaPlan] = []
        for merged in self._dealings(pieces, mesh):
            own = self._own(merged, count, mesh, judge, layout)
            for multiple in SHARED if merged.shared else SHARED[:1]:
                shared = slice_shared(merged, multiple * count, self.rules.cap, self._prefix_work)
                plans = [_plan(each, number, shared, layout) for number, each in enumerate(own)]
                score = score_of(plans, judge)
                if best is None or score < best:
                    best, chosen = score, plans
        return chosen if judge.sees_sharding else [sharded(each, shard) for each in chosen]

    def _judge(self, mesh: Mesh) -> Judge:
        if mesh.judge is not None:
            return mesh.judge
        costs = self.rules.costs
        stages, each = mesh.stages, mesh.stages_per_rank
        # Passes that are open on the first rank in 1F1B, plain or interleaved.
        most_open = stages if each == 1 else (each + 1) * stages - 1
        return PipelineJudge(
            costs.total,
            costs.forward,
            stages,
            each,
            costs.forward(max(self.rules.window // OVERHEAD, 1)),
            most_open * self.rules.cap,
        )

    def _dealings(self, pieces: list[Piece], mesh: Mesh) -> Iterator[Merged]:
        """Without shared pieces; and where that is not balanced, with ever smaller shares."""
        merged = merge_pieces(pieces, mesh.replicas, self._prefix_work, 0)
        yield merged
        if mesh.stages_per_rank > 1 or not mesh.slices:
            return  # They cannot share.
        busiest = max(merged.loads)
        if 100 * mesh.replicas * busiest <= UNBALANCED_PERCENT * sum(merged.loads):
            return
        for per_capacity in (1, 2, 4, 8):
            merged = merge_pieces(pieces, mesh.replicas, self._prefix_work, per_capacity)
            if max(merged.loads) < busiest:
                busiest = max(merged.loads)
                yield merged

    def _own(
        self, merged: Merged, count: int, mesh: Mesh, judge: Judge, layout: Shard
    ) -> list[Chosen]:
        """What each replica runs of its own, with ``count`` micro-batches over all as the measure.

        It is chosen without what replicas share, which is the same whatever becomes of their own.
        """
        rules, work = self.rules, self._prefix_work
        loads = own_work(merged, work)
        nominal = share_packs(loads, count, sum(merged.loads))
        result: list[Chosen] = [None] * mesh.replicas
        way, latest = FEWEST, Score(False, 0)
        for number in sorted(range(mesh.replicas), key=lambda number: -loads[number]):
            if not merged.own[number]:
                continue
            candidates = Candidates(
                merged.own[number],
                nominal[number],
                rules.cap,
                work,
                rules.costs.total,
                mesh.stages,
                mesh.stages_per_rank,
                judge,
                layout,
                self._passes if mesh.slices and not merged.shared else None,
                mesh.slices,
            )
            if latest.time == 0 or candidates.score(way) > latest:
                way = candidates.best()
                latest = max(latest, candidates.score(way))
            result[number] = candidates, way
        return result


def _plan(chosen: Chosen, number: int, shared: list[Shared], shard: Shard) -> ReplicaPlan:
    of_replica = [each for each in shared if number in each[1]]
    if chosen is None:
        return replica_plan([], number, shard, of_replica)
    candidates, way = chosen
    return candidates.plan(way, number, of_replica, shard)
