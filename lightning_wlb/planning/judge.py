"""How long a replica's plan takes on its pipeline: what packings choose between plans by.

The schedule's actions go through the simulator. Their durations are the exact work of their
slices, spread evenly over the stages, and for every action an overhead: what a pass through a
stage costs beside the arithmetic, and what smaller kernels lose. Without it the smallest
micro-batches would always win.

Cost: 1 µs for each action in plain Python, so 1 ms for 64 micro-batches on 4 stages. Blind to the
device; with a profile, judge by :mod:`~lightning_wlb.planning.predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning.merging import shared_work
from lightning_wlb.schedule.actions import BACKWARD, FORWARD
from lightning_wlb.schedule.packflow import backward_orders, packflow
from lightning_wlb.schedule.programs import meetings_of
from lightning_wlb.schedule.simulate import Simulation, simulate_replicas


@dataclass(frozen=True)
class PipelineJudge:
    """Simulates replicas on one pipeline.

    Args:
        total: forward and backward work of a piece's first tokens, an integer.
        forward: its forward work.
        ranks: of the pipeline, P.
        stages_per_rank: V.
        overhead: of each action, in the unit of ``total``.
    """

    total: Callable[[int], int]
    forward: Callable[[int], int]
    ranks: int
    stages_per_rank: int = 1
    overhead: int = 0

    def __call__(self, replicas: Sequence[ReplicaPlan]) -> list[Simulation]:
        """The step, in the time that a rank takes for ``total`` (as if it had all layers).

        ``peak_bytes`` counts tokens of open micro-batches instead, once for each stage.

        Args:
            replicas: all of a step, or one that shares no micro-batch; micro-batches that they
                share must come first on all that share them.
        """
        passes = [self._passes(replica) for replica in replicas]
        programs = [
            [packflow(rank, self.ranks, *order, self.stages_per_rank) for rank in range(self.ranks)]
            for order in backward_orders(replicas)
        ]
        return simulate_replicas(
            programs,
            lambda replica, action: passes[replica][action.kind][action.micro_batch],
            opened_bytes=lambda replica, action: passes[replica]["tokens"][action.micro_batch],
            shared=meetings_of(replicas),
        )

    def _passes(self, replica: ReplicaPlan) -> dict[str, list[int]]:
        """Of each micro-batch the length of either pass, and the tokens on one replica."""
        passes: dict[str, list[int]] = {FORWARD: [], BACKWARD: [], "tokens": []}
        for group in replica.forward:
            total = first = 0
            for part in replica.slices_of(group):
                begin, end = part.context, part.stop - part.origin
                total += self.total(end) - (self.total(begin) if begin else 0)
                first += self.forward(end) - (self.forward(begin) if begin else 0)
            members = len(group.replicas)
            if members > 1:
                total, first = shared_work(total, members), shared_work(first, members)
            passes[FORWARD].append(first // self.stages_per_rank + self.overhead)
            passes[BACKWARD].append((total - first) // self.stages_per_rank + self.overhead)
            passes["tokens"].append(-(-replica.tokens_of(group) // members))
        return passes
