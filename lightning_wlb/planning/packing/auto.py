"""Whatever the simulator finds fastest, step by step: whole pieces or slices, and how many.

Nothing waits, so every step holds its own global batch. Each replica is planned in several ways:
whole pieces in as few micro-batches as it has by tokens and in twice as many, and slices in M
MicroPacks, equal and tapered, for M at logarithmic distances from the nominal number (or the number
of stages, if that is more) to eight times it (SlimPack §5.1). The plan whose simulated step is
shortest is taken, if it fits: in the device's memory where that is known, else with no more tokens
open than 1F1B has with full micro-batches. Among equals the first is taken, and whole pieces come
first.

Where dealing whole pieces to the replicas leaves one with 2 % more work than the mean, pieces may
be shared by several (:mod:`~lightning_wlb.planning.merging`): those above a replica's capacity, or
above a half, a quarter or an eighth of it, whatever the simulator finds fastest, or none.

Times are predicted from a device profile if the planner has one (``Planner(judge=...)``); else they
are exact work, and an action's overhead, which is what bounds M, is the forward of 1 % of a context
window of short documents. Holding long pieces back, which pays for whole pieces, was
measured to gain nothing with slices (Generator A, N = 4, four stages: 1.182 times the step's work
without delay, 1.186 at a mean delay of 0.25 steps), so there is no delay to budget.

On a pipeline of one stage it packs whole pieces, as few micro-batches as the cap allows: there is
no bubble to fill. Cost: up to 18 simulations per replica and step, of which those with the most
micro-batches take longest: 25 ms on four stages for N = 4 on one replica, 100 ms for N = 16 on
four. The data loader plans ahead of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_wlb.plan import Piece, ReplicaPlan, Slice
from lightning_wlb.planning.judge import Judge, PipelineJudge
from lightning_wlb.planning.merging import Merged, merge_pieces
from lightning_wlb.planning.packing.base import Groups, Mesh
from lightning_wlb.planning.packing.slim import SlimPacker, plans_of
from lightning_wlb.planning.packing.wlb import pack
from lightning_wlb.planning.replicas import (
    Shard,
    replica_plan,
    sharded,
    unsharded,
    whole,
)
from lightning_wlb.planning.slicing import PrefixWork, slice_pieces

SHARED = (2, 4, 8)  # MicroPacks of shared pieces are as long as so many times N over the step
HALVES = (2, 3, 4, 6, 8, 12, 16)  # MicroPacks in halves of the nominal number
UNBALANCED_PERCENT = 102  # work of the busiest replica to the mean above which pieces are shared
OVERHEAD = 100  # an action costs the forward of a short piece of C / OVERHEAD tokens


class AutoPacker(SlimPacker):
    """Slices and whole pieces, chosen by simulation."""

    def replicas(self, groups: Groups, mesh: Mesh, shard: Shard) -> list[ReplicaPlan]:
        """The dealing, with or without shared pieces, whose simulated step is shortest."""
        work, judge = self._prefix_work, self._judge(mesh)
        pieces = [piece for group in groups for piece in group]
        best: int | None = None
        chosen: list[ReplicaPlan] = []
        # A replica without a micro-batch for each stage cannot fill its pipeline.
        count = max(self.rules.micro_batches, mesh.stages * mesh.replicas)
        for merged in self._dealings(pieces, mesh, work):
            own = [
                self._fastest(dealt, nominal, mesh, judge, shard)
                for dealt, nominal in zip(merged.own, self._counts(merged, count), strict=True)
            ]
            for multiple in SHARED if merged.shared else SHARED[:1]:
                shared = self._shared(merged, multiple * count)
                plans = plans_of(own, shared, shard if judge.sees_sharding else unsharded)
                longest = max(step.total_ns for step in judge(plans))
                if best is None or longest < best:
                    best, chosen = longest, plans
        return chosen if judge.sees_sharding else [sharded(each, shard) for each in chosen]

    def _fastest(
        self, pieces: list[Piece], nominal: int, mesh: Mesh, judge: Judge, shard: Shard
    ) -> list[list[Slice]]:
        """The micro-batches of one replica's own pieces.

        They are judged without those that it shares with others, which are the same whatever
        becomes of its own.
        """
        best: tuple[bool, int] | None = None
        chosen: list[list[Slice]] = []
        for made in self._candidates(pieces, nominal, mesh):
            plan = replica_plan(made, 0, shard if judge.sees_sharding else unsharded)
            (step,) = judge([plan])
            score = max(step.peak_bytes, default=0) > judge.limit, step.total_ns
            if best is None or score < best:
                best, chosen = score, made
        return chosen

    def _judge(self, mesh: Mesh) -> Judge:
        if mesh.judge is not None:
            return mesh.judge
        costs = self.rules.costs
        return PipelineJudge(
            costs.total,
            costs.forward,
            mesh.stages,
            mesh.stages_per_rank,
            costs.forward(max(self.rules.window // OVERHEAD, 1)),
            mesh.stages * mesh.stages_per_rank * self.rules.cap,
        )

    def _dealings(self, pieces: list[Piece], mesh: Mesh, work: PrefixWork) -> Iterator[Merged]:
        """Without shared pieces; and where that is not balanced, with ever smaller shares."""
        alone = merge_pieces(pieces, mesh.replicas, work, 0)
        yield alone
        if mesh.stages_per_rank > 1:
            return  # They cannot share.
        if 100 * mesh.replicas * max(alone.loads) <= UNBALANCED_PERCENT * sum(alone.loads):
            return
        for per_capacity in (1, 2, 4, 8):
            merged = merge_pieces(pieces, mesh.replicas, work, per_capacity)
            if merged.shared:
                yield merged

    def _candidates(
        self, pieces: list[Piece], packs: int, mesh: Mesh
    ) -> Iterator[list[list[Slice]]]:
        """MicroPacks of whole pieces, then of slices."""
        rules = self.rules
        if not pieces:
            return
        tokens = sum(piece.tokens for piece in pieces)
        least = -(-tokens // rules.cap)
        for bins in sorted({least, least + 1, packs, 2 * packs}):
            groups, carried = pack(pieces, bins, rules.cap, rules.costs.total)
            if not carried:
                yield [[whole(piece) for piece in group] for group in groups if group]
        if mesh.stages > 1:
            for halves in HALVES:
                for taper in (0, mesh.stages - 1):
                    yield slice_pieces(
                        pieces, -(-packs * halves // 2), rules.cap, self._prefix_work, taper=taper
                    )
            return
        # One stage and no room for whole pieces.
        yield slice_pieces(pieces, least, rules.cap, self._prefix_work)
