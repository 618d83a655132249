"""Whatever the simulator finds fastest, step by step: whole pieces or slices, and how many.

The pieces of a step are dealt to the replicas by work, and each replica's become micro-batches in
the way whose simulated step is shortest (:mod:`~lightning_wlb.planning.search`), of those that
fit: in the device's memory where that is known, else with no more tokens open than 1F1B has with
full micro-batches. The replica with the most work searches first. What suits it is taken for every
other one that it makes no later than the latest so far; only a replica that would be later searches
for itself.

Where dealing whole pieces to the replicas leaves one with 2 % more work than the mean, pieces may
be shared by several (:mod:`~lightning_wlb.planning.dp_merge`): those above a replica's capacity, or
above a half, a quarter or an eighth of it, whatever the simulator finds fastest, or none.

Times are predicted from a device profile if the planner has one (``Planner(judge=...)``); else they
are exact work, and an action's overhead, which is what bounds the number of micro-batches, is the
forward of 1 % of a context window of short documents.

Nothing waits: slices leave a pipeline nothing to wait for. Only of documents of more than two
global batches a step takes no more than that.

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
from typing import ClassVar

from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.dp_merge import Merged, merge_pieces, own_work, slice_shared
from lightning_wlb.planning.judge import Judge, PipelineJudge
from lightning_wlb.planning.outlier_queues import oldest_first
from lightning_wlb.planning.packing.base import Groups, Packer, Placement
from lightning_wlb.planning.replicas import Shard, Shared, replica_plan, sharded, unsharded
from lightning_wlb.planning.search import FEWEST, Candidates, Score, Way, score_of
from lightning_wlb.planning.slicing import share_packs

SHARED = (2, 4, 8)  # MicroPacks of shared pieces are as long as so many times N over the step
UNBALANCED_PERCENT = 102  # work of the busiest replica to the mean above which pieces are shared
OVERHEAD = 100  # an action costs the forward of a short piece of C / OVERHEAD tokens

Chosen = tuple[Candidates, Way] | None
"""What a replica runs of its own; None: nothing."""


class AutoPacker(Packer):
    """Slices and whole pieces, chosen by simulation."""

    cap_percent: ClassVar[int] = 100

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """The oldest pieces of at most 2·N·C tokens, as one group: the mesh will divide them."""
        admitted, carried = oldest_first(pieces, 2 * self.rules.nominal_tokens)
        return [admitted], carried

    def replicas(self, groups: Groups, place: Placement) -> list[ReplicaPlan]:
        """The dealing, with or without shared pieces, whose simulated step is shortest."""
        judge = place.judge or self.exact_judge(place.mesh)
        layout = place.shard if judge.sees_sharding else unsharded
        pieces = [piece for group in groups for piece in group]
        # A replica without a micro-batch for each stage cannot fill its pipeline.
        count = max(self.rules.micro_batches, place.mesh.pipeline * place.mesh.data)
        best: Score | None = None
        chosen: list[ReplicaPlan] = []
        for merged in self._dealings(pieces, place):
            own = self._own(merged, count, place, judge, layout)
            for multiple in SHARED if merged.shared else SHARED[:1]:
                shared = slice_shared(
                    merged, multiple * count, self.rules.cap, self.rules.work.total
                )
                plans = [_plan(each, number, shared, layout) for number, each in enumerate(own)]
                score = score_of(plans, judge)
                if best is None or score < best:
                    best, chosen = score, plans
        return chosen if judge.sees_sharding else [sharded(each, place.shard) for each in chosen]

    def exact_judge(self, mesh: Mesh) -> PipelineJudge:
        """Simulates exact work; what the method chooses by where no device is known."""
        work, stages, each = self.rules.work, mesh.pipeline, mesh.virtual_stages
        # Passes that are open on the first rank in 1F1B, plain or interleaved.
        most_open = stages if each == 1 else (each + 1) * stages - 1
        overhead = work.forward(max(self.rules.window // OVERHEAD, 1))
        return PipelineJudge(work, mesh, overhead, most_open * self.rules.cap)

    def _dealings(self, pieces: list[Piece], place: Placement) -> Iterator[Merged]:
        """Without shared pieces; and where that is not balanced, with ever smaller shares."""
        replicas, work = place.mesh.data, self.rules.work.total
        merged = merge_pieces(pieces, replicas, work, 0)
        yield merged
        if place.mesh.virtual_stages > 1 or not place.slices:
            return  # They cannot share.
        busiest = max(merged.loads)
        if 100 * replicas * busiest <= UNBALANCED_PERCENT * sum(merged.loads):
            return
        for per_capacity in (1, 2, 4, 8):
            merged = merge_pieces(pieces, replicas, work, per_capacity)
            if max(merged.loads) < busiest:
                busiest = max(merged.loads)
                yield merged

    def _own(
        self, merged: Merged, count: int, place: Placement, judge: Judge, layout: Shard
    ) -> list[Chosen]:
        """What each replica runs of its own, with ``count`` micro-batches over all as the measure.

        It is chosen without what replicas share, which is the same whatever becomes of their own.
        """
        work = self.rules.work.total
        loads = own_work(merged, work)
        nominal = share_packs(loads, count, sum(merged.loads))
        result: list[Chosen] = [None] * place.mesh.data
        way, latest = FEWEST, Score(False, 0)
        for number in sorted(range(place.mesh.data), key=lambda number: -loads[number]):
            if not merged.own[number]:
                continue
            candidates = Candidates(
                merged.own[number],
                nominal[number],
                self.rules.cap,
                work,
                place.mesh,
                judge,
                layout,
                place.slices,
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
