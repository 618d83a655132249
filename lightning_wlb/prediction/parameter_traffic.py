"""When parameters have been gathered and gradients reduced, while the actions of a step run.

:mod:`~lightning_wlb.training.gather_and_reduce` gathers a pipeline rank's buckets (layers,
embedding and head) one after another from the step's begin on, in the order of its stages, and a
forward goes on as soon as its next bucket has arrived. The gradients of a bucket are reduced when
the last backward of every replica has passed through it, one after another from last to first.

This is a closed form: the buckets of a stage are assumed to be equal in bytes and in time, so that
only the first and the last of them can delay a rank. A test compares it with single buckets.

Cost: O(stages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.prediction.step_memory import StepMemory
from lightning_wlb.schedule.simulator import LastBackward


@dataclass(frozen=True)
class ParameterTraffic:
    """The exchanges of each stage's ranks with the ranks that share its parameters; times in ns."""

    ranks: int  #: ranks of the pipeline
    buckets: tuple[int, ...]  #: number of buckets of each stage, virtual stages in order
    gather: tuple[int, ...]  #: time to gather all buckets of a stage
    reduce: tuple[int, ...]  #: time to reduce the gradients of all buckets of a stage
    optimise: int  #: time of the optimizer on the shards of the slowest rank

    @staticmethod
    def of(latency: LatencyModel, memory: StepMemory) -> ParameterTraffic:
        """The traffic of parameters that are sharded over data × context of the model's mesh."""
        parts = memory.parts
        counts = [memory.model.parameters(each) for each in parts]
        of_ranks = map(memory.model.parameters, memory.rank_parts)
        return ParameterTraffic(
            latency.mesh.pipeline,
            tuple(sum(each.layers) + each.embedding + each.head for each in parts),
            tuple(map(latency.gather_ns, counts)),
            tuple(map(latency.reduce_ns, counts)),
            max(map(latency.optimise_ns, of_ranks)),
        )

    def begins(self, stage: int, forward_ns: int) -> int:
        """The earliest time at which a stage's first forward can begin and run without waits."""
        before = sum(self.gather[stage % self.ranks : stage : self.ranks])
        each, buckets = self.gather[stage], self.buckets[stage]
        last = before + each - (forward_ns - forward_ns // buckets)
        return max(before + each // buckets, last)

    def ends(self, last: Mapping[int, Sequence[LastBackward]]) -> int:
        """When the last gradient has been reduced; 0 without any.

        ``last`` has, for each stage that runs a backward, the last one of each replica.
        """
        ends = [0]
        for rank in range(self.ranks):
            queue = 0
            for stage in reversed(range(rank, len(self.buckets), self.ranks)):
                backwards = last.get(stage)
                if backwards is None:
                    continue
                buckets, each = self.buckets[stage], self.reduce[stage]
                first = max(end - (took - took // buckets) for end, took in backwards)
                end = max(end for end, _ in backwards)
                queue = max(max(queue, first) + each, end + each // buckets)
            ends.append(queue)
        return max(ends)
