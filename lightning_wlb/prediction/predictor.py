"""Predicts a plan: every action's duration, and the simulated step.

The predictor connects the plan, the cost model and the simulator. A micro-batch is laid out on its
context-parallel group as the plan says (:mod:`~lightning_wlb.prediction.micro_batch`). An action
takes the time of its stage's layers, of the embedding or the head there, and an overhead. Messages
between stages are the simulator's transfers. Parameters are gathered and gradients reduced while
actions run (:mod:`~lightning_wlb.prediction.parameter_traffic`). A micro-batch of several replicas
(DP-Merge) begins when all of them can, and its keys are sent over the links of the data-parallel
axis. Bytes come from :mod:`~lightning_wlb.prediction.step_memory`.

The predictor simulates the list of actions that the executor runs, so both can be compared action
by action. Products hide messages of a layer's rows and keys (:mod:`~lightning_wlb.cost.overlap`).

Cost: about 0.1 ms per micro-batch and context rank for the layout, 1 µs per action for the
simulation. :mod:`~lightning_wlb.prediction.step_totals`, for a step's end and peak, takes a tenth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lightning_wlb.cost.flops import (
    causal_pairs,
    head_flops,
    layer_attention_flops,
    layer_linear_flops,
)
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.memory_model import MemoryModel, StageParts, usable_bytes
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.plan import Recompute, ReplicaPlan, Slice, StepPlan, piece_counts
from lightning_wlb.prediction.estimate import Estimates
from lightning_wlb.prediction.micro_batch import (
    PASSES,
    MicroBatchCost,
    micro_batch_cost,
    most_of_a_rank,
)
from lightning_wlb.prediction.parameter_traffic import ParameterTraffic
from lightning_wlb.prediction.step import SimulatedReplicas, StepPrediction
from lightning_wlb.prediction.step_memory import StepMemory
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.schedule.packflow import backward_orders
from lightning_wlb.schedule.programs import check_stages, program_of
from lightning_wlb.schedule.simulator import simulate_replicas
from lightning_wlb.sharding import ADAPTIVE, layout


def model_stages(shape: ModelShape, stages: int, mean_context: int) -> list[range]:
    """The layers of each pipeline stage, split by cost as the strategy does.

    Args:
        stages: number of stages, with virtual stages.
        mean_context: tokens that a token attends to on average (:func:`mean_context_of`).

    Raises:
        ValueError: more stages than layers.
    """
    costs = {
        layer: layer_linear_flops(layer, 1) + layer_attention_flops(layer, 1, mean_context)
        for layer in shape.kinds
    }
    layers = [costs[layer] for layer in shape.each_layer]
    layers[-1] += head_flops(shape, 1)
    return split_stages(layers, stages)


def split_stages(costs: Sequence[int], stages: int) -> list[range]:
    """The layers of each stage by number: the split whose most expensive stage is cheapest.

    Among equal splits the one with more layers in earlier stages is taken. It is found by dynamic
    programming in O(stages · layers²). ``costs`` are the layers' costs in any unit; the last
    layer's includes the head, which over a large vocabulary costs as much as several layers.

    Raises:
        ValueError: there are fewer layers than stages, or no stage.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"{count} layers cannot be split into {stages} pipeline stages"
            " (pipeline_parallel_size, times virtual_pipeline_size): every stage needs at least"
            f" one layer. Use at most {count} stages, or a deeper model."
        )
    prefix = [0, *accumulate(costs)]

    @cache
    def best(stage: int, first: int) -> tuple[int, int]:
        """(cost of the most expensive stage from here on, minus the layer where it stops)."""
        if stage == stages - 1:
            return prefix[count] - prefix[first], -count
        return min(
            (max(prefix[stop] - prefix[first], best(stage + 1, stop)[0]), -stop)
            for stop in range(first + 1, count - (stages - 1 - stage) + 1)
        )

    result, first = [], 0
    for stage in range(stages):
        stop = -best(stage, first)[1]
        result.append(range(first, stop))
        first = stop
    return result


def mean_context_of(lengths: npt.NDArray[np.int64], context_window: int) -> int:
    """Tokens that a token attends to, its own included, on average over documents.

    Documents longer than ``context_window`` are cut into pieces.
    """
    counts = piece_counts(lengths, context_window)
    pairs = sum(count * causal_pairs(tokens) for tokens, count in counts.items())
    return pairs // max(int(lengths.sum()), 1)


@dataclass(frozen=True)
class Predictor:
    """Predicts steps of one model on one mesh of one device.

    Raises:
        ValueError: a schedule that cannot run so many stages per rank.
    """

    latency: LatencyModel
    stages: tuple[range, ...]  #: layers of each stage, virtual stages in order
    schedule: str = "1f1b"  #: a name in ``lightning_wlb.schedule.programs.SCHEDULES``
    rest_dtype: str = "float32"  #: dtype of sharded parameters and optimizer state
    #: times of gathering and reducing parameters if they are sharded over another mesh; None: they
    #: are sharded over data × context of this mesh
    linked: ParameterTraffic | None = None
    #: process groups of a rank, which take memory; by default those of the mesh
    groups: int | None = None
    # Results of _rest_ns, whose arguments recur in every plan.
    _rests: dict[tuple[StageParts, int], tuple[int, int]] = field(
        default_factory=dict, init=False, compare=False
    )

    def __post_init__(self) -> None:
        mesh = self.latency.mesh
        assert len(self.stages) == mesh.stages, "stages of another mesh"
        check_stages(self.schedule, mesh.virtual_stages)

    @cached_property
    def memory(self) -> StepMemory:
        """The bytes that the ranks hold."""
        latency = self.latency
        model = MemoryModel(
            latency.shape,
            latency.mesh,
            latency.profile.dtype,
            self.rest_dtype,
            accelerator=latency.profile.device_type != "cpu",
            reduce_dtype=latency.reduce_dtype,
            kernel=latency.profile.kernel,
            overlap=latency.overlap == "all",
        )
        return StepMemory.of(model, self.stages)

    @cached_property
    def traffic(self) -> ParameterTraffic:
        """When parameters have been gathered, and gradients reduced."""
        return self.linked or ParameterTraffic.of(self.latency, self.memory)

    @property
    def usable_bytes(self) -> int:
        """Bytes of the device that may be filled."""
        return usable_bytes(self.latency.profile, self.latency.mesh, self.groups)

    def longest_micro_batch(self, recompute: Recompute = "none") -> int:
        """L_max: tokens of the longest micro-batch that fits as a replica's only one, or 0."""
        longest, usable = self.memory.model.longest_micro_batch, self.usable_bytes
        return min(longest(parts, 1, usable, 1, recompute) for parts in self.memory.rank_parts)

    def micro_batch(
        self, slices: Sequence[Slice], sharding: str, *, replicas: int = 1, going_on: int = 0
    ) -> MicroBatchCost:
        """The cost of a micro-batch under the named sharding (:func:`.micro_batch_cost`)."""
        lengths = [each.tokens for each in slices]
        mesh = self.latency.mesh
        placed = layout(sharding, lengths, mesh.context * replicas, mesh.tensor)
        return micro_batch_cost(self.latency, slices, placed, replicas=replicas, going_on=going_on)

    def action_ns(self, stage: int, cost: MicroBatchCost) -> tuple[int, int]:
        """Forward and backward time of one micro-batch on one stage."""
        parts = self.memory.parts[stage]
        forward, backward = self._rest_ns(parts, cost.rows)
        for count, (of_forward, of_backward) in zip(parts.layers, cost.times.layer_ns, strict=True):
            forward += count * of_forward
            backward += count * of_backward
        return forward, backward

    def predict(self, plan: StepPlan) -> StepPrediction:
        """The simulated step of a plan for the mesh; a :class:`.Pool` predicts plans with schemes.

        Raises:
            ValueError: shared micro-batches with virtual stages.
        """
        assert not plan.schemes, "pipelines of its own"
        assert len(plan.replicas) == self.latency.mesh.data, "a plan for another mesh"
        return StepPrediction(plan, self.latency, *self.simulate(plan.replicas))

    def simulate(self, replicas: Sequence[ReplicaPlan]) -> SimulatedReplicas:
        """The step of replicas that share micro-batches only with each other."""
        return self.run(replicas, list(map(self.costs, replicas)))

    def programs(
        self, replicas: Sequence[ReplicaPlan], costs: Sequence[Sequence[MicroBatchCost]]
    ) -> tuple[list[list[list[Action]]], list[Mapping[Action, int]]]:
        """[replicas][ranks], the actions of each rank; and the bytes they free (:meth:`.freed`)."""
        ranks, virtual = self.latency.mesh.pipeline, self.latency.mesh.virtual_stages
        orders = backward_orders(replicas)
        programs = [
            [
                program_of(self.schedule, rank, ranks, virtual, replicas, number, orders)
                for rank in range(ranks)
            ]
            for number in range(len(replicas))
        ]
        freed = [
            self.memory.freed(of_replica, replica, each)
            for of_replica, replica, each in zip(programs, replicas, costs, strict=True)
        ]
        return programs, freed

    def run(
        self, replicas: Sequence[ReplicaPlan], costs: list[list[MicroBatchCost]]
    ) -> SimulatedReplicas:
        """Simulate replicas whose micro-batches have these costs."""
        memory = self.memory
        programs, freed = self.programs(replicas, costs)
        durations = list(map(self.stage_durations, costs))
        saved = [memory.saved(of_replica).tolist() for of_replica in costs]

        def duration(replica: int, action: Action) -> int:
            of_pass = durations[replica][action.kind == BACKWARD]
            return of_pass[action.stage][action.micro_batch]

        def transfer(replica: int, action: Action) -> int:
            source = action.stage - 1 if action.kind == FORWARD else action.stage
            return self.latency.pipeline_ns(costs[replica][action.micro_batch].rows, source)

        def changed_bytes(replica: int, action: Action) -> int:
            own: int = saved[replica][action.micro_batch][action.stage]
            others = freed[replica].get(action, 0)
            return own - others if action.kind == FORWARD else own + others

        simulations = simulate_replicas(
            programs,
            duration,
            transfer,
            changed_bytes=changed_bytes,
            constant_bytes=memory.constant(costs),
            begins=lambda replica, action: self.traffic.begins(
                action.stage, duration(replica, action)
            ),
            reduced=self.traffic.ends,
            synchronisation_ns=self.traffic.optimise,
            sharers=[replica.sharers for replica in replicas],
        )
        peak = max(map(memory.peak, simulations, costs), default=0)
        return SimulatedReplicas(costs, simulations, peak)

    def stage_durations(
        self, costs: Sequence[MicroBatchCost]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Forward and backward times in ns, each [stages][micro-batches in forward order]."""
        layers = np.array([cost.times.layer_ns for cost in costs], dtype=np.int64)
        layers = layers.reshape(len(costs), len(self.latency.shape.kinds), 2)
        like: dict[StageParts, list[list[int]]] = {}
        for parts in self.memory.parts:
            if parts not in like:
                rest = [self._rest_ns(parts, cost.rows) for cost in costs]
                both = (layers * np.array(parts.layers)[:, None]).sum(axis=1)
                like[parts] = (both + np.array(rest, np.int64).reshape(-1, 2)).T.tolist()
        every = [like[parts] for parts in self.memory.parts]
        return [forward for forward, _ in every], [backward for _, backward in every]

    def _rest_ns(self, parts: StageParts, rows: int) -> tuple[int, int]:
        """Time of a stage besides its layers, for ``rows`` rows, forward and backward."""
        key = parts, rows
        if key not in self._rests:
            latency = self.latency
            # The time of an embedding's look-up includes its gradient.
            summed = self.memory.model.parameters(replace(parts, embedding=False))
            forward, backward = (
                latency.action_ns(rows, summed, backward=each)
                + (latency.embedding_ns(rows, backward=each) if parts.embedding else 0)
                + (latency.head_ns(rows, backward=each) if parts.head else 0)
                for each in PASSES
            )
            self._rests[key] = forward, backward
        return self._rests[key]

    def costs(self, replica: ReplicaPlan, *, estimated: bool = False) -> list[MicroBatchCost]:
        """The costs of a replica's micro-batches.

        They are estimates (:mod:`~lightning_wlb.prediction.estimate`) if ``estimated``, or if a
        sharding is still to be chosen (``lightning_wlb.sharding.ADAPTIVE``).
        """
        if estimated or any(each.sharding == ADAPTIVE for each in replica.forward):
            return self._estimates.of(replica)
        return [
            self.micro_batch(
                replica.slices_of(micro_batch),
                micro_batch.sharding,
                replicas=len(micro_batch.replicas),
                going_on=going_on,
            )._replace(recompute=micro_batch.recompute)
            for micro_batch, going_on in zip(replica.forward, replica.going_on, strict=True)
        ]

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self.latency)

    def sizes(self, replica: ReplicaPlan) -> list[MicroBatchCost]:
        """The :meth:`costs` of a laid-out replica, with exact sizes but estimated times."""
        context, result = self.latency.mesh.context, self.costs(replica, estimated=True)
        alike: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for at, each in enumerate(replica.forward):
            if each.slices:
                alike[each.sharding, context * len(each.replicas)].append(at)
        for (sharding, ranks), places in alike.items():
            slices = [replica.slices_of(replica.forward[at]) for at in places]
            found = most_of_a_rank(self.latency, sharding, slices, ranks)
            for at, (keys, segments) in zip(places, found, strict=True):
                rows = replica.forward[at].rows
                result[at] = result[at]._replace(
                    rows=rows,
                    keys=keys,
                    segments=segments,
                    indexed=keys if ranks > 1 else 0,
                    kept_rows=rows if result[at].kept_rows else 0,
                )
        return result
