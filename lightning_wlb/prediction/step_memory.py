"""What the ranks of a pipeline hold in the course of a step, from the memory model.

A forward opens bytes that its own backward frees (:class:`StepMemory`).
Some bytes are made by one action and freed by another (:func:`freed_bytes`):

* the gradients of an earlier micro-batch's keys, which the first backward of a later slice of the
  same piece makes, for the whole micro-batch, and the micro-batch's own backward takes
  (:mod:`~lightning_wlb.attention.sliced`);
* the gradient that a backward sends to the stage before, which is held until a message comes back
  that proves its arrival (:mod:`~lightning_wlb.schedule.actions`). What a forward sends on is held
  until its own backward anyway.

Cost: about 2 µs per action.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np

from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.plan import Recompute, ReplicaPlan
from lightning_wlb.prediction.step import MODES, MicroBatchCost
from lightning_wlb.schedule.actions import BACKWARD, Action, receipts, target_of
from lightning_wlb.schedule.packflow import backward_order
from lightning_wlb.sharding.integer_ranges import Integers


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the ranks of a pipeline. ``costs`` are those of a replica's micro-batches by number.

    Args:
        model: memory of the model on the mesh.
        layers: of each stage, virtual ones in order: how many of each kind of layer.
    """

    model: MemoryModel
    layers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(model: MemoryModel, stages: Sequence[range]) -> StepMemory:
        """Of the stages with these layers, by global layer number."""
        held = [[model.shape.each_layer[number] for number in stage] for stage in stages]
        kinds = model.shape.kinds
        return StepMemory(model, tuple(tuple(map(layers.count, kinds)) for layers in held))

    @cached_property
    def parts(self) -> tuple[StageParts, ...]:
        """What each stage owns of the model."""
        last = len(self.layers) - 1
        return tuple(StageParts(n, at == 0, at == last) for at, n in enumerate(self.layers))

    @cached_property
    def rank_parts(self) -> tuple[StageParts, ...]:
        """What each pipeline rank owns, over all its stages."""
        ranks = self.model.mesh.pipeline
        return tuple(
            StageParts(
                tuple(map(sum, zip(*self.layers[rank::ranks], strict=True))),
                rank == 0,
                rank == ranks - 1,
            )
            for rank in range(ranks)
        )

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Parameters, gradients and optimizer state of each pipeline rank."""
        return tuple(map(self.model.state_bytes, self.rank_parts))

    def saved(self, stage: int, cost: MicroBatchCost) -> int:
        """What a forward opens on a stage until its backward has run."""
        parts = self.parts[stage]
        kept = self.model.kept_keys_bytes(parts, cost.kept_rows, cost.recompute)
        return self.model.micro_batch_bytes(parts, cost.rows, cost.recompute) + kept

    def inside(
        self, parts: StageParts, cost: MicroBatchCost, recompute: Recompute | None = None
    ) -> int:
        """What lives only inside a pass of a micro-batch, perhaps with another recomputation."""
        mode = recompute or cost.recompute
        return self.model.transient_bytes(parts, cost.rows, cost.keys, mode, cost.segments)

    def saved_by_all(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """:meth:`saved` of every micro-batch on every stage, int64 [micro-batches, stages]."""
        rows, kept = self._units(costs)
        each, keys = self._unit_bytes[:, [MODES.index(cost.recompute) for cost in costs]]
        saved: Integers = rows[:, None] * each + kept[:, None] * keys
        return saved

    def key_gradients_of_all(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """Gradients of keys that later slices read, int64 [micro-batches, stages]."""
        unit = self.model.mesh.tensor
        each = [self.model.key_gradient_bytes(parts, unit) for parts in self.parts]
        gradients: Integers = self._units(costs)[1][:, None] * np.array(each)
        return gradients

    def boundaries(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """What every micro-batch sends to a neighbour, int64 [micro-batches]."""
        sent: Integers = self._units(costs)[0] * self.model.boundary_bytes(self.model.mesh.tensor)
        return sent

    def _units(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """Rows and kept rows, [2, micro-batches], in units that tensor parallelism divides."""
        rows = np.array([(cost.rows, cost.kept_rows) for cost in costs], dtype=np.int64)
        return rows.reshape(-1, 2).T // self.model.mesh.tensor

    @cached_property
    def _unit_bytes(self) -> Integers:
        """What a unit of rows saves, and keeps for later slices, [2, modes, stages].

        Rows are multiples of the unit, in which all sizes are linear.
        """
        unit = self.model.mesh.tensor
        return np.array(
            [
                [[size(parts, unit, mode) for parts in self.parts] for mode in MODES]
                for size in (self.model.micro_batch_bytes, self.model.kept_keys_bytes)
            ],
            dtype=np.int64,
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
            lambda stage, micro_batch: self.model.key_gradient_bytes(
                self.parts[stage], costs[micro_batch].kept_rows
            ),
            lambda micro_batch: self.model.boundary_bytes(costs[micro_batch].rows),
        )

    def constant(self, replicas: Sequence[Sequence[MicroBatchCost]]) -> list[int]:
        """What each rank holds all along: its state, and the step's inputs on the fullest replica.

        Args:
            replicas: the costs of each replica.
        """
        sums = [
            (sum(cost.rows for cost in costs), sum(cost.indexed for cost in costs))
            for costs in replicas
        ]
        return [
            state + max(self.model.input_bytes(parts, *rows) for rows in sums)
            for state, parts in zip(self.state_bytes, self.rank_parts, strict=True)
        ]

    def peak(
        self,
        programs: Sequence[Sequence[Action]],
        held: Sequence[Sequence[int]],
        costs: Sequence[MicroBatchCost],
    ) -> int:
        """Most bytes on a rank of a replica, with what lives only inside a backward.

        Args:
            programs: of the ranks.
            held: bytes on each rank while each action of its program runs.
            costs: of the replica.
        """
        most = 0
        for action, bytes_held in zip(chain(*programs), chain(*held), strict=True):
            if action.kind == BACKWARD:
                cost, parts = costs[action.micro_batch], self.parts[action.stage]
                inside = self.inside(parts, cost)
                most = max(most, bytes_held + inside)
        return most


def most_open(program: Sequence[Action], virtual_stages: int) -> int:
    """Most micro-batches that a rank's program holds at once, through all its stages together."""
    passes = accumulate(-1 if action.kind == BACKWARD else 1 for action in program)
    return -(-max(passes, default=0) // virtual_stages)


def freed_bytes(
    programs: Sequence[Sequence[Action]],
    replica: ReplicaPlan,
    stages: int,
    key_gradients: Callable[[int, int], int],
    boundary: Callable[[int], int],
) -> Mapping[Action, int]:
    """What each action frees that others made, less what it makes for others to free.

    Args:
        programs: of the replica's ranks.
        replica: as it is executed (``prediction.executed``).
        stages: of all ranks.
        key_gradients: of (stage, micro-batch), bytes of the gradients of its keys.
        boundary: of a micro-batch, bytes that a stage sends to its neighbour.

    Returns:
        Bytes of each action; no entry means 0.
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
    """Of each micro-batch whose keys others read, the one whose backward does so first.

    Args:
        replica: as it is executed (``prediction.executed``).

    Returns:
        Its place in ``forward``, and that of its first reader in ``backward``.
    """
    keys = [part[:2] for part in replica.slices]
    counts = Counter(keys)
    if len(counts) == len(keys):
        return {}  # every piece is whole
    place = {  # of the backward
        number: at
        for at, micro_batch in enumerate(replica.backward)
        for number in micro_batch.slices
    }
    pieces: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for at, micro_batch in enumerate(replica.forward):
        for number in micro_batch.slices:
            if counts[keys[number]] > 1:
                part = replica.slices[number].start, at, place[number]
                pieces.setdefault(keys[number], []).append(part)
    readers: dict[int, int] = {}
    for parts in pieces.values():
        parts.sort(reverse=True)
        first = parts[0][2]
        for (_, later, _), (_, at, reader) in pairwise(parts):
            if at != later:
                readers[at] = min(first, readers.get(at, first))
            first = min(first, reader)
    return readers
