"""What the ranks of a pipeline hold in the course of a step, from the memory model.

A forward opens bytes that its own backward frees (:class:`StepMemory`, from ``cost/memory.py``).
Besides, actions leave bytes for others to free (:func:`freed_bytes`):

* the backward of a later slice leaves gradients of an earlier micro-batch's keys, which that one's
  own backward takes (:mod:`~lightning_wlb.attention.sliced`). The first such backward makes them,
  for the whole micro-batch;
* a backward leaves the gradient that it sends to the stage before, until a message comes back that
  proves its arrival (:mod:`~lightning_wlb.schedule.receipts`). What a forward sends on is held
  until its backward anyway.

``costs`` are those of a replica's micro-batches by number. Cost: about 2 µs per action, and the
square of the slices of a piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_wlb.cost.memory import MemoryModel, StageParts
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.prediction.step import MicroBatchCost
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, target_of
from lightning_wlb.schedule.packflow import backward_order
from lightning_wlb.schedule.receipts import receipts


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
        """What actions free beyond what their forwards opened, see :func:`freed_bytes`."""
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


def freed_bytes(
    programs: Sequence[Sequence[Action]],
    replica: ReplicaPlan,
    stages: int,
    key_gradients: Callable[[int, int], int],
    boundary: Callable[[int], int],
) -> Mapping[Action, int]:
    """What each action frees of what others left, less what it leaves; 0 where not named.

    Args:
        programs: of the replica's ranks.
        replica: as it is executed (``prediction.executed``).
        stages: of all ranks.
        key_gradients: of (stage, micro-batch), bytes of the gradients of its keys.
        boundary: of a micro-batch, bytes that a stage sends to its neighbour.
    """
    freed: defaultdict[Action, int] = defaultdict(int)
    order, _ = backward_order(replica)
    for micro_batch, reader in first_readers(replica).items():
        for stage in range(stages):
            size = key_gradients(stage, micro_batch)
            freed[Action(stage, BACKWARD, order[reader])] -= size
            freed[Action(stage, BACKWARD, micro_batch)] += size
    ranks = len(programs)
    by_rank = dict(enumerate(programs))
    for rank, program in enumerate(programs):
        for action in program:
            target = target_of(action, stages)
            if action.kind == BACKWARD and target is not None and target.stage % ranks != rank:
                freed[action] -= boundary(action.micro_batch)
        for receiver, sends in receipts(by_rank, rank, ranks, stages).items():
            freed[receiver] += sum(
                boundary(sent.micro_batch) for sent in sends if sent.kind == BACKWARD
            )
    return freed


def first_readers(replica: ReplicaPlan) -> dict[int, int]:
    """Of each forward micro-batch whose keys others read in backward, the first that does.

    Args:
        replica: as it is executed (``prediction.executed``).

    Returns:
        Places in ``forward``, and in ``backward``.
    """
    slices_of: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    place = {number: at for at, group in enumerate(replica.forward) for number in group.slices}
    for number, part in enumerate(replica.slices):
        slices_of[part.document, part.origin].append((part.start, number))
    readers: dict[int, int] = {}
    for at, group in enumerate(replica.backward):
        own = set(group.slices)
        for part in replica.slices_of(group):
            if part.context:
                for start, number in slices_of[part.document, part.origin]:
                    if start < part.start and number not in own:
                        readers.setdefault(place[number], at)
    return readers
