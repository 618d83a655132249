"""What the ranks of a pipeline hold in the course of a step, from the memory model.

``costs`` are those of a replica's micro-batches by number. Cost: linear in actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_wlb.cost.memory import MemoryModel, StageParts
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning.leaving import freed_bytes
from lightning_wlb.planning.prediction import MicroBatchCost
from lightning_wlb.schedule.actions import FORWARD, Action


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the passes of a step.

    Args:
        memory: of the model on the mesh.
        parts: of the model that each stage owns.
        rank_parts: that each pipeline rank owns, over all its stages.
    """

    memory: MemoryModel
    parts: tuple[StageParts, ...]
    rank_parts: tuple[StageParts, ...]

    def saved(self, stage: int, cost: MicroBatchCost) -> int:
        """What a forward opens on a stage until its backward has run."""
        parts = self.parts[stage]
        return self.memory.micro_batch_bytes(parts, cost.rows) + self.memory.kept_keys_bytes(
            parts, cost.kept_rows
        )

    def freed(
        self,
        programs: Sequence[Sequence[Action]],
        replica: ReplicaPlan,
        costs: Sequence[MicroBatchCost],
    ) -> Mapping[Action, int]:
        """What actions free beyond what their forwards opened, see ``planning.leaving``."""
        return freed_bytes(
            programs,
            replica,
            len(self.parts),
            lambda stage, micro_batch: self.memory.key_gradient_bytes(
                self.parts[stage], costs[micro_batch].kept_rows
            ),
            lambda micro_batch: self.memory.boundary_bytes(costs[micro_batch].rows),
        )

    def constant(
        self, state: Sequence[int], costs: Sequence[Sequence[MicroBatchCost]]
    ) -> list[int]:
        """What each rank holds all along: its ``state``, and the step's inputs.

        Args:
            state: of each pipeline rank.
            costs: of each replica.
        """
        inputs = (
            max(
                sum(self.memory.input_bytes(parts, cost.rows, cost.indexed) for cost in of_replica)
                for of_replica in costs
            )
            for parts in self.rank_parts
        )
        return [state + size for state, size in zip(state, inputs, strict=True)]

    def peak(
        self, program: Sequence[Action], held: Sequence[int], costs: Sequence[MicroBatchCost]
    ) -> int:
        """Most bytes on a pipeline rank: what it holds, and what lives only inside a backward."""
        return max(
            (
                bytes_held + self._inside(action.stage, costs[action.micro_batch])
                for action, bytes_held in zip(program, held, strict=True)
                if action.kind != FORWARD
            ),
            default=0,
        )

    def _inside(self, stage: int, cost: MicroBatchCost) -> int:
        return self.memory.transient_bytes(self.parts[stage], cost.rows, cost.keys)
