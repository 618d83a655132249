"""How long a replica's plan takes on its pipeline: what packings choose between plans by.

The schedule's actions go through the simulator. Their durations are the exact work of their
slices, spread evenly over the stages, and for every action an overhead: what a pass through a
stage costs beside the arithmetic, and what smaller kernels lose. Without it the smallest
micro-batches would always win.

Cost: 1 µs for each action in plain Python, so 1 ms for 64 micro-batches on 4 stages. Blind to the
device; with a profile, :class:`PredictedJudge` knows what its kernels and links make of small
micro-batches, at ten times the cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from lightning_wlb.cost.memory import USABLE_PERCENT
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning.merging import shared_work
from lightning_wlb.planning.predict import Predictor
from lightning_wlb.schedule.actions import BACKWARD, FORWARD
from lightning_wlb.schedule.packflow import backward_orders, packflow
from lightning_wlb.schedule.programs import meetings_of
from lightning_wlb.schedule.simulate import Simulation, simulate_replicas


class Judge(Protocol):
    """Simulates replicas of a step, and says how much a rank may hold.

    Attributes:
        sees_sharding: whether the shardings of the replicas' micro-batches matter.
    """

    sees_sharding: ClassVar[bool]

    @property
    def limit(self) -> int:
        """Most that ``peak_bytes`` of a simulation may be."""

    def __call__(self, replicas: Sequence[ReplicaPlan]) -> list[Simulation]:
        """The step of all replicas, or of one that shares no micro-batch."""


@dataclass(frozen=True)
class PipelineJudge:
    """Simulates replicas on one pipeline.

    Args:
        total: forward and backward work of a piece's first tokens, an integer.
        forward: its forward work.
        ranks: of the pipeline, P.
        stages_per_rank: V.
        overhead: of each action, in the unit of ``total``.
        limit: tokens that a rank may have open, counted once for each of its stages.
    """

    sees_sharding: ClassVar[bool] = False

    total: Callable[[int], int]
    forward: Callable[[int], int]
    ranks: int
    stages_per_rank: int = 1
    overhead: int = 0
    limit: int = sys.maxsize

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


@dataclass(frozen=True)
class PredictedJudge:
    """Predicts replicas from a device profile, under the device's memory.

    Args:
        predictor: of the model on the mesh.
    """

    predictor: Predictor

    sees_sharding: ClassVar[bool] = True

    @property
    def limit(self) -> int:
        """Bytes of a device that may be filled."""
        return self.predictor.latency.profile.memory_bytes * USABLE_PERCENT // 100

    def __call__(self, replicas: Sequence[ReplicaPlan]) -> list[Simulation]:
        """The step in ns."""
        return list(self.predictor.simulate(replicas).simulations)
