"""How long a replica's plan takes on its pipeline: what packings choose between plans by.

The schedule's actions go through the simulator. Their durations are the exact work of their
slices, spread evenly over the stages, and for every action an overhead: what a pass through a
stage costs beside the arithmetic, and what smaller kernels lose. Without it the smallest
micro-batches would always win.

Cost: 1 µs for each action in plain Python, so 1 ms for 64 micro-batches on 4 stages. Blind to the
device; with a profile, judge by :mod:`~lightning_wlb.planning.predict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD
from lightning_wlb.schedule.packflow import backward_order, packflow
from lightning_wlb.schedule.simulate import Simulation, simulate


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

    def __call__(self, replica: ReplicaPlan) -> Simulation:
        """The step, in the time that a rank takes for ``total`` (as if it had all layers).

        ``peak_bytes`` counts tokens of open micro-batches instead, once for each stage.
        """
        order, needs = backward_order(replica)
        passes: dict[str, list[int]] = {FORWARD: [], BACKWARD: []}
        tokens: list[int] = []
        for group in replica.forward:
            total = first = 0
            for part in replica.slices_of(group):
                begin, end = part.context, part.stop - part.origin
                total += self.total(end) - (self.total(begin) if begin else 0)
                first += self.forward(end) - (self.forward(begin) if begin else 0)
            passes[FORWARD].append(first // self.stages_per_rank + self.overhead)
            passes[BACKWARD].append((total - first) // self.stages_per_rank + self.overhead)
            tokens.append(replica.tokens_of(group))
        programs = [
            packflow(rank, self.ranks, order, needs, self.stages_per_rank)
            for rank in range(self.ranks)
        ]
        return simulate(
            programs,
            lambda action: passes[action.kind][action.micro_batch],
            opened_bytes=lambda action: tokens[action.micro_batch],
        )
