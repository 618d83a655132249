"""When parameters have been gathered and gradients reduced, behind the actions of a step.

As :mod:`~lightning_wlb.training.parameter_buckets` does it: each pipeline rank gathers its units
(layers
and ends) one after another from the step's begin on, in the order of its stages, and a forward goes
on where its next unit is there. Gradients of a unit are reduced when the last backward of every
replica has passed through it, from the last unit to the first, one after another.

In closed form: the units of a stage are taken to be equal in traffic and in time, so that only the
first and the last of them can hold a rank up.

Cost: O(stages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.prediction.step_memory import StepMemory

LastBackward = tuple[int, int]
"""When a replica's last backward on a stage ends, and how long it takes, in ns."""


@dataclass(frozen=True)
class Traffic:
    """Of one rank of each stage with the other replicas' ranks; times in ns.

    Args:
        ranks: of the pipeline.
        units: of each stage, virtual ones in order.
        gather: all of a stage.
        reduce: likewise.
        optimise: the optimizer's pass over the shards of the slowest rank.
        before: until the first unit can travel: in a step whose pipelines differ from the mesh's,
            over the first of two hops.
        after: when the last unit has travelled, until gradients are where they rest.
    """

    ranks: int
    units: tuple[int, ...]
    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    optimise: int
    before: int = 0
    after: int = 0

    @staticmethod
    def of(latency: LatencyModel, memory: StepMemory) -> Traffic:
        """On the mesh of the two."""
        parts = memory.parts
        counts = [memory.model.parameters(each) for each in parts]
        of_ranks = map(memory.model.parameters, memory.rank_parts)
        return Traffic(
            latency.mesh.pipeline,
            tuple(sum(each.layers) + each.embedding + each.head for each in parts),
            tuple(map(latency.gather_ns, counts)),
            tuple(map(latency.reduce_ns, counts)),
            max(map(latency.optimise_ns, of_ranks)),
        )

    def begins(self, stage: int, forward_ns: int) -> int:
        """From when on the first forward of a stage can run without a pause."""
        before = self.before + sum(self.gather[stage % self.ranks : stage : self.ranks])
        each, units = self.gather[stage], self.units[stage]
        last = before + each - (forward_ns - forward_ns // units)
        return max(before + each // units, last)

    def ends(self, last: Mapping[int, Sequence[LastBackward]]) -> int:
        """When the last gradient is there; 0 without any.

        Args:
            last: of stages on which a backward runs, the last one of each replica.
        """
        ends = [0]
        for rank in range(self.ranks):
            queue = 0
            for stage in reversed(range(rank, len(self.units), self.ranks)):
                backwards = last.get(stage)
                if backwards is None:
                    continue
                units, each = self.units[stage], self.reduce[stage]
                first = max(end - (took - took // units) for end, took in backwards)
                end = max(end for end, _ in backwards)
                queue = max(max(queue, first) + each, end + each // units)
            ends.append(queue)
        return max(ends) + self.after if last else 0
