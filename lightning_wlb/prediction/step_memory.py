"""How many bytes the ranks of a pipeline hold in the course of a step, by the memory model.

A forward allocates bytes that its own backward frees (:meth:`StepMemory.saved`). Some bytes are
allocated by one action and freed by another (:meth:`StepMemory.freed`):

* the gradients of an earlier micro-batch's keys, and of a recurrence's state at its end: the first
  backward of a later slice of the same piece allocates them for the whole micro-batch, and the
  micro-batch's own backward frees them (:mod:`~lightning_wlb.attention.key_exchange`);
* the gradient that backward sends to the stage before, which is held until a message back proves
  its arrival (:mod:`~lightning_wlb.schedule.actions`). A forward's output waits for its backward.

Cost: about 2 µs per action. For 1F1B :mod:`~lightning_wlb.prediction.step_totals` needs no actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np

from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.cost.shape import Recurrence
from lightning_wlb.plan import Recompute, ReplicaPlan
from lightning_wlb.prediction.micro_batch import MODES, MicroBatchCost
from lightning_wlb.schedule.actions import BACKWARD, Action, receipts, target_of
from lightning_wlb.schedule.simulator import Simulation
from lightning_wlb.sharding.integer_ranges import Integers


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the ranks of a pipeline; ``costs`` are those of one replica's micro-batches."""

    model: MemoryModel
    layers: tuple[tuple[int, ...], ...]  #: number of layers of each kind on each stage, in order

    @staticmethod
    def of(model: MemoryModel, stages: Sequence[range]) -> StepMemory:
        """The memory of stages that have these layers, by global layer number."""
        held = [[model.shape.each_layer[number] for number in stage] for stage in stages]
        kinds = model.shape.kinds
        return StepMemory(model, tuple(tuple(map(layers.count, kinds)) for layers in held))

    @cached_property
    def parts(self) -> tuple[StageParts, ...]:
        """The parts of the model that each stage owns."""
        last = len(self.layers) - 1
        return tuple(StageParts(n, at == 0, at == last) for at, n in enumerate(self.layers))

    @cached_property
    def rank_parts(self) -> tuple[StageParts, ...]:
        """The parts of the model that each pipeline rank owns, over all its stages."""
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

    def constant(self, replicas: Sequence[Sequence[MicroBatchCost]]) -> list[int]:
        """Bytes that each rank always holds: state, and the inputs of the fullest replica."""
        return self.held_all_along(map(self.inputs, replicas))

    def held_all_along(self, inputs: Iterable[Sequence[int]]) -> list[int]:
        """Bytes of state on each rank plus the most bytes of :meth:`inputs` of any replica."""
        most = map(max, zip(*inputs, strict=True))
        return [state + held for state, held in zip(self.state_bytes, most, strict=True)]

    def inputs(self, costs: Sequence[MicroBatchCost]) -> list[int]:
        """Bytes of the inputs of a replica's micro-batches on each rank."""
        rows, index = sum(cost.rows for cost in costs), sum(cost.indexed for cost in costs)
        return [self.model.input_bytes(parts, rows, index) for parts in self.rank_parts]

    def saved(self, costs: Sequence[MicroBatchCost], mode: Recompute | None = None) -> Integers:
        """Bytes that each forward holds until its backward has run, int64 [micro-batches, stages].

        ``mode`` is what all micro-batches recompute; None: each recomputes what its cost says.
        """
        rows, kept = self._row_units(costs)
        each, keys = self._unit_bytes[:, _modes(costs, mode)]
        saved: Integers = rows[:, None] * each + kept[:, None] * keys + self._states(costs)
        return saved

    def inside(self, costs: Sequence[MicroBatchCost], mode: Recompute | None = None) -> Integers:
        """Bytes that exist only inside a pass of each micro-batch, int64 [micro-batches, stages].

        The arguments are those of :meth:`saved`.
        """
        sizes = np.array(
            [(cost.rows, cost.keys, cost.segments) for cost in costs], dtype=np.int64
        ).reshape(-1, 3)
        modes = np.array(_modes(costs, mode), dtype=np.int64)
        inside = np.zeros((len(costs), len(self.parts)), np.int64)
        model, kinds = self.model, self.model.shape.kinds
        has = np.array(self.layers).T > 0  # [kinds, stages]
        for number in set(modes.tolist()):
            alike = modes == number
            rows, keys, segments = sizes[alike].T
            of_kinds = [
                model.layer_transient_bytes(layer, rows, keys, MODES[number], segments)
                for layer in kinds
            ]
            inside[alike] = (np.stack(of_kinds)[:, :, None] * has[:, None]).max(axis=0)
            inside[alike, -1] = np.maximum(inside[alike, -1], model.head_transient_bytes(rows))
        return inside

    def key_gradients(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """Gradients of keys and states for later slices, int64 [micro-batches, stages]."""
        unit = self.model.mesh.tensor
        each = [self.model.key_gradient_bytes(parts, unit) for parts in self.parts]
        gradients: Integers = self._row_units(costs)[1][:, None] * np.array(each)
        return gradients + self._states(costs)

    def _states(self, costs: Sequence[MicroBatchCost]) -> Integers | int:
        """Bytes of recurrent states at the ends of slices, int64 [micro-batches, stages]."""
        if not self.model.shape.recurrent:
            return 0
        pieces = np.array([(cost.going_on, cost.ranks) for cost in costs], dtype=np.int64)
        count, ranks = pieces.reshape(-1, 2, 1).swapaxes(0, 1)
        return count * self._piece_bytes // ranks

    @cached_property
    def _piece_bytes(self) -> Integers:
        """Bytes that each stage passes from a slice to the next one, on all context ranks."""
        width, wide = DTYPE_BYTES[self.model.dtype], max(DTYPE_BYTES[self.model.dtype], 4)
        # Every tensor-parallel rank computes whole convolutions.
        of_kinds = [
            each.state // self.model.mesh.tensor * wide + each.last_rows * width
            for each in (layer.recurrence or Recurrence() for layer in self.model.shape.kinds)
        ]
        bytes_of: Integers = np.array(self.layers) @ np.array(of_kinds)
        return bytes_of

    def boundaries(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """Bytes that each micro-batch sends to a neighbouring stage, int64 [micro-batches]."""
        unit = self.model.mesh.tensor
        sent: Integers = self._row_units(costs)[0] * self.model.boundary_bytes(unit)
        return sent

    def _row_units(self, costs: Sequence[MicroBatchCost]) -> Integers:
        """Rows and kept rows divided by the tensor-parallel size, [2, micro-batches].

        Rows are multiples of that size, and all bytes but :meth:`inside` are linear in them.
        """
        rows = np.array([(cost.rows, cost.kept_rows) for cost in costs], dtype=np.int64)
        return rows.reshape(-1, 2).T // self.model.mesh.tensor

    @cached_property
    def _unit_bytes(self) -> Integers:
        """Bytes that a unit of :meth:`_row_units` saves, and keeps, [2, modes, stages]."""
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
        """Bytes of other actions that each action frees, less bytes that it leaves for others.

        No entry means 0. ``programs`` are the actions of each rank of the replica.
        """
        freed: defaultdict[Action, int] = defaultdict(int)
        stages, ranks = len(self.parts), len(programs)
        boundary = self.boundaries(costs).tolist()
        readers = first_readers(replica)
        if readers:
            gradients = self.key_gradients(costs).tolist()
            for micro_batch, reader in readers.items():
                for stage, size in enumerate(gradients[micro_batch]):
                    freed[Action(stage, BACKWARD, replica.backward[reader])] -= size
                    freed[Action(stage, BACKWARD, micro_batch)] += size
        by_rank = dict(enumerate(programs))
        for rank, program in enumerate(programs):
            for action in program:
                target = target_of(action, stages)
                if action.kind == BACKWARD and target is not None and target.stage % ranks != rank:
                    freed[action] -= boundary[action.micro_batch]
            for receiver, sends in receipts(by_rank, rank, ranks, stages).items():
                freed[receiver] += sum(
                    boundary[sent.micro_batch] for sent in sends if sent.kind == BACKWARD
                )
        return freed

    def peak(self, simulation: Simulation, costs: Sequence[MicroBatchCost]) -> int:
        """Most bytes on a rank of a replica, with the bytes that exist only inside a backward."""
        inside = self.inside(costs).tolist()
        every = zip(chain(*simulation.spans), chain(*simulation.held_bytes), strict=True)
        return max(
            (
                held + inside[action.micro_batch][action.stage]
                for (action, _, _), held in every
                if action.kind == BACKWARD
            ),
            default=0,
        )


def _modes(costs: Sequence[MicroBatchCost], mode: Recompute | None) -> list[int]:
    """The recomputation of each micro-batch, as an index in :data:`.MODES`."""
    return [MODES.index(mode or cost.recompute) for cost in costs]


def most_open(program: Sequence[Action], virtual_stages: int) -> int:
    """Most micro-batches that a rank's program has open at once, over all its stages together."""
    passes = accumulate(-1 if action.kind == BACKWARD else 1 for action in program)
    return -(-max(passes, default=0) // virtual_stages)


def first_readers(replica: ReplicaPlan) -> dict[int, int]:
    """For each micro-batch whose keys later slices read, the reader that runs backward first.

    The micro-batch's place in ``forward`` -> its first reader's place in ``backward``.
    """
    keys = [part[:2] for part in replica.slices]
    counts = Counter(keys)
    if len(counts) == len(keys):
        return {}  # every piece is whole
    places = {number: place for place, number in enumerate(replica.backward)}
    pieces: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for at, micro_batch in enumerate(replica.forward):
        for number in micro_batch.slices:
            if counts[keys[number]] > 1:
                part = replica.slices[number].start, at, places[at]
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
