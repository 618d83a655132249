"""What the ranks of a pipeline hold in the course of a step, from the memory model.

``costs`` are those of a replica's micro-batches by number, ``again`` those of its backward
micro-batches that run forward again, none where the plan does not recompute.

Cost: linear in actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from lightning_wlb.cost.memory import MemoryModel, StageParts
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning.leaving import freed_bytes, freed_bytes_recomputed
from lightning_wlb.planning.prediction import MicroBatchCost
from lightning_wlb.schedule.actions import FORWARD, RECOMPUTED, Action


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the passes of a step.

    Args:
        memory: of the model on the mesh.
        again: the same without activation checkpointing: of backwards that run forward again.
        parts: of the model that each stage owns.
        rank_parts: that each pipeline rank owns, over all its stages.
    """

    memory: MemoryModel
    again: MemoryModel
    parts: tuple[StageParts, ...]
    rank_parts: tuple[StageParts, ...]

    def saved(
        self, stage: int, costs: Sequence[MicroBatchCost], again: Sequence[MicroBatchCost]
    ) -> list[tuple[int, int]]:
        """What a forward opens, and what a backward that runs forward again opens, by number."""
        parts = self.parts[stage]
        if again:
            forward = [self.kept(stage, cost) for cost in costs]
            backward = [self.again.micro_batch_bytes(parts, cost.rows) for cost in again]
            return list(zip_longest(forward, backward, fillvalue=0))
        return [
            (
                self.memory.micro_batch_bytes(parts, cost.rows)
                + self.memory.kept_keys_bytes(parts, cost.kept_rows),
                0,
            )
            for cost in costs
        ]

    def kept(self, stage: int, cost: MicroBatchCost) -> int:
        """What a forward keeps that backward runs again: its input, and keys that others read."""
        keys = replace(self.memory, activation_checkpointing="full").kept_keys_bytes(
            self.parts[stage], cost.kept_rows
        )
        return keys + (self.memory.boundary_bytes(cost.rows) if stage else 0)

    def freed(
        self,
        programs: Sequence[Sequence[Action]],
        replica: ReplicaPlan,
        costs: Sequence[MicroBatchCost],
        again: Sequence[MicroBatchCost],
    ) -> Mapping[Action, int]:
        """What actions free beyond what their forwards opened, see ``planning.leaving``."""
        if replica.recompute:
            return freed_bytes_recomputed(
                programs,
                replica,
                len(self.parts),
                lambda stage, micro_batch: self.kept(stage, costs[micro_batch]),
                lambda stage, micro_batch: self.memory.key_gradient_bytes(
                    self.parts[stage], costs[micro_batch].kept_rows
                ),
                lambda action: self.memory.boundary_bytes(
                    (again if action.kind == RECOMPUTED else costs)[action.micro_batch].rows
                ),
            )
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
        self,
        state: Sequence[int],
        costs: Sequence[tuple[Sequence[MicroBatchCost], Sequence[MicroBatchCost]]],
    ) -> list[int]:
        """What each rank holds all along: its ``state``, and the step's inputs."""
        inputs = (
            max(
                sum(
                    self.memory.input_bytes(parts, cost.rows, cost.indexed)
                    for cost in chain(*of_replica)
                )
                for of_replica in costs
            )
            for parts in self.rank_parts
        )
        return [state + size for state, size in zip(state, inputs, strict=True)]

    def peak(
        self,
        program: Sequence[Action],
        held: Sequence[int],
        costs: Sequence[MicroBatchCost],
        again: Sequence[MicroBatchCost],
    ) -> int:
        """Most bytes on a pipeline rank: what it holds, and what lives only inside a backward."""
        return max(
            (
                bytes_held
                + (
                    self._inside(self.again, action.stage, again[action.micro_batch])
                    if action.kind == RECOMPUTED
                    else self._inside(self.memory, action.stage, costs[action.micro_batch])
                )
                for action, bytes_held in zip(program, held, strict=True)
                if action.kind != FORWARD
            ),
            default=0,
        )

    def _inside(self, memory: MemoryModel, stage: int, cost: MicroBatchCost) -> int:
        return memory.transient_bytes(self.parts[stage], cost.rows, cost.keys)
