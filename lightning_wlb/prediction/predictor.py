"""What a plan will take: every action's duration, and the simulated step.

The glue between the plan, the cost model and the simulator. A micro-batch is laid out on its
context-parallel group as the plan says (:mod:`~lightning_wlb.prediction.micro_batch`). An action
is its stage's layers, its ends and its overhead; messages between stages are the simulator's
transfers; parameters and gradients travel once, at the end. What the passes hold is in
:mod:`~lightning_wlb.prediction.memory`.

The prediction is of the list of actions that the executor runs, so the two compare action by
action. Communication is not overlapped with computation here, because the executor overlaps none.

Cost: about 0.1 ms per micro-batch and context rank for the layout, and 1 µs per action for the
simulation. Of slices, earlier keys are attended to, gathered with their own keys, and gathered
again in backward, and their gradients added to their owners. A micro-batch of several replicas
(DP-Merge) begins when all of them can, and its keys travel over the links of the data-parallel
axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_wlb.cost.flops import (
    ModelShape,
    Work,
    attention_flops,
    causal_pairs,
    head_flops,
    layer_linear_flops,
)
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.memory import MemoryModel, StageParts
from lightning_wlb.plan import ReplicaPlan, Slice, StepPlan
from lightning_wlb.prediction.executed import units
from lightning_wlb.prediction.memory import StepMemory
from lightning_wlb.prediction.micro_batch import micro_batch_cost
from lightning_wlb.prediction.step import MicroBatchCost, StepPrediction
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.schedule.programs import make_programs, meetings_of, program_of
from lightning_wlb.schedule.simulate import Simulation, simulate_replicas
from lightning_wlb.schedule.stages import split_stages
from lightning_wlb.sharding import layout


def model_stages(shape: ModelShape, stages: int, mean_context: int) -> list[range]:
    """The layers of each pipeline stage, split by cost as the strategy does.

    Args:
        shape: of the whole model.
        stages: number of stages, virtual ones counted.
        mean_context: tokens that a token attends to on average, see :func:`mean_context_of`.

    Raises:
        ValueError: more stages than layers.
    """
    attention = attention_flops(shape, 1, mean_context) // shape.layers
    layer = layer_linear_flops(shape, 1) + attention
    return split_stages([layer] * shape.layers, stages, embedding=0, head=head_flops(shape, 1))


def mean_context_of(lengths: npt.NDArray[np.int64], context_window: int) -> int:
    """Tokens that a token attends to, its own included, on average over documents.

    Args:
        lengths: tokens of each document.
        context_window: longer documents are pieces of so many tokens.
    """
    whole, rest = np.divmod(lengths, context_window)
    pairs = int(whole.sum()) * causal_pairs(context_window)
    pairs += sum(causal_pairs(tokens) for tokens in rest.tolist())
    return pairs // max(int(lengths.sum()), 1)


class SimulatedReplicas(NamedTuple):
    """The steps of some replicas.

    Attributes:
        costs: of each replica's micro-batches.
        durations: for each replica, how long each action computes, in ns.
        programs: of each replica's ranks.
        simulations: one for each replica.
    """

    costs: list[list[MicroBatchCost]]
    durations: list[dict[Action, int]]
    programs: list[list[list[Action]]]
    simulations: list[Simulation]


@dataclass(frozen=True)
class Predictor:
    """Predicts steps of one model on one mesh of one device.

    Args:
        latency: of the model on the mesh.
        stages: layers of each stage, virtual ones in order.
        schedule: name in ``lightning_wlb.schedule.programs.SCHEDULES``.
        rest_dtype: of parameters and optimizer state at rest.

    Raises:
        ValueError: another number of stages than the mesh has, or a schedule that cannot run so
            many per rank.
    """

    latency: LatencyModel
    stages: tuple[range, ...]
    schedule: str = "1f1b"
    rest_dtype: str = "float32"

    def __post_init__(self) -> None:
        mesh = self.latency.mesh
        if len(self.stages) != mesh.stages:
            raise ValueError(
                f"{len(self.stages)} stages for pipeline={mesh.pipeline} ranks with"
                f" virtual_stages={mesh.virtual_stages} each: give {mesh.stages}."
            )
        self._programs(0)

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory of the same model on the same mesh."""
        return MemoryModel(
            self.latency.shape,
            self.latency.mesh,
            self.latency.activation_checkpointing,
            self.latency.profile.dtype,
            self.rest_dtype,
            fused_norm=self.latency.profile.device_type != "cpu",
        )

    def parts(self, stage: int) -> StageParts:
        """What one stage owns."""
        return StageParts(len(self.stages[stage]), stage == 0, stage == len(self.stages) - 1)

    @cached_property
    def rank_parts(self) -> tuple[StageParts, ...]:
        """What each pipeline rank owns, over all its stages."""
        ranks = self.latency.mesh.pipeline
        return tuple(
            StageParts(
                layers=sum(len(self.stages[s]) for s in range(rank, len(self.stages), ranks)),
                embedding=rank == 0,
                head=rank == ranks - 1,
            )
            for rank in range(ranks)
        )

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Parameters, gradients and optimizer state of each pipeline rank."""
        return tuple(map(self.memory.state_bytes, self.rank_parts))

    @cached_property
    def step_memory(self) -> StepMemory:
        """What the passes of a step hold."""
        parts = tuple(self.parts(stage) for stage in range(len(self.stages)))
        return StepMemory(self.memory, parts, self.rank_parts)

    @cached_property
    def synchronisation_ns(self) -> int:
        """Parameters gathered, gradients reduced and applied, on the slowest pipeline rank."""
        counts = map(self.memory.parameters, self.rank_parts)
        return max(map(self.latency.data_parallel_ns, counts))

    def longest_micro_batch(self, micro_batches: int) -> int:
        """L_max: tokens of a micro-batch of which a replica can run ``micro_batches``; 0 if none.

        The schedule decides how many are open at once on each rank.
        """
        limits = []
        for rank, program in enumerate(self._programs(micro_batches)):
            most = _most_open(program)
            # Open stage passes, in units of all the rank's stages together.
            units = -(-most // self.latency.mesh.virtual_stages)
            limits.append(
                self.memory.longest_micro_batch(
                    self.rank_parts[rank],
                    units,
                    self.latency.profile.memory_bytes,
                    micro_batches,
                )
            )
        return min(limits)

    def micro_batch(
        self, pieces: Sequence[Slice], sharding: str, *, replicas: int = 1, kept: bool = False
    ) -> MicroBatchCost:
        """The cost of a micro-batch of slices under a sharding of the registry.

        Args:
            pieces: its slices.
            sharding: name of it.
            replicas: that share the micro-batch.
            kept: whether a later micro-batch reads its keys.
        """
        lengths = [piece.tokens for piece in pieces]
        mesh = self.latency.mesh
        placed = layout(sharding, lengths, mesh.context * replicas, mesh.tensor)
        return micro_batch_cost(self.latency, pieces, placed, replicas=replicas, kept=kept)

    def piece_work(self, micro_batch_tokens: int) -> Callable[[int], int]:
        """W_a + W_l of WLB-LLM Equation 2 as time: a function from a piece's tokens to ps.

        Forward and backward of one layer: attention as if it were spread evenly over the context
        ranks, the rest, communication included, per token of a micro-batch of
        ``micro_batch_tokens``. What the paper packs by; this project's packers go by FLOPs, which
        every cluster agrees on.
        """
        latency, ranks = self.latency, self.latency.mesh.context
        rows = -(-micro_batch_tokens // ranks)
        shared = sum(
            latency.linear_ns(rows, backward=backward)
            + latency.tensor_parallel_ns(rows, backward=backward)
            + latency.context_parallel_ns((ranks - 1) * rows, rows, backward=backward)
            for backward in (False, True)
        )

        def work(tokens: int) -> int:
            length = np.array([tokens], dtype=np.int64)
            attention = int(latency.segment_cost(length, length)[0]) // ranks
            return attention + 1000 * shared * tokens // micro_batch_tokens

        return work

    def action_ns(self, stage: int, cost: MicroBatchCost) -> tuple[int, int]:
        """Forward and backward of one micro-batch on one stage."""
        latency, parts, rows = self.latency, self.parts(stage), cost.rows
        result = []
        for backward in (False, True):
            time = len(self.stages[stage]) * cost.layer_ns[backward]
            time += latency.action_ns(rows, backward=backward)
            if parts.embedding:
                time += latency.embedding_ns(rows, backward=backward)
            if parts.head:
                time += latency.head_ns(rows, backward=backward)
            result.append(time)
        return result[0], result[1]

    def predict(self, plan: StepPlan) -> StepPrediction:
        """The simulated step.

        Raises:
            ValueError: a replica count that is not the mesh's, or shared micro-batches with
                virtual stages.
        """
        mesh = self.latency.mesh
        if len(plan.replicas) != mesh.data:
            raise ValueError(
                f"the plan is for {len(plan.replicas)} replicas, the mesh {mesh} has {mesh.data}."
            )
        step = self.simulate(plan.replicas)
        most = max(map(len, step.costs), default=0)
        work = np.zeros((len(step.costs), most), dtype=np.int64)
        for number, durations in enumerate(step.durations):
            for action, duration in durations.items():
                work[number, action.micro_batch] += duration
        return StepPrediction(
            plan=plan,
            simulations=tuple(step.simulations),
            costs=tuple(map(tuple, step.costs)),
            work_ns=work,
            peak_bytes=self.peak_bytes(step),
            flops=sum(Work.of(self.latency.shape).total(piece.tokens) for piece in plan.pieces),
            devices=self.latency.mesh.devices,
            peak_flops=self.latency.profile.peak_flops,
        )

    def peak_bytes(self, step: SimulatedReplicas) -> int:
        """Of the fullest rank of some replicas, state included."""
        return max(
            (
                self.step_memory.peak(program, held, costs)
                for programs, simulation, costs in zip(
                    step.programs, step.simulations, step.costs, strict=True
                )
                for program, held in zip(programs, simulation.held_bytes, strict=True)
            ),
            default=0,
        )

    def simulate(self, replicas: Sequence[ReplicaPlan]) -> SimulatedReplicas:
        """The step of replicas that share micro-batches with each other only."""
        mesh = self.latency.mesh
        replicas = [units(replica, mesh.context, mesh.tensor) for replica in replicas]
        costs = [self._costs(replica) for replica in replicas]
        durations = [self._durations(of_replica) for of_replica in costs]
        programs = self._programs_of(replicas)
        freed = [
            self.step_memory.freed(of_replica, replica, each)
            for of_replica, replica, each in zip(programs, replicas, costs, strict=True)
        ]

        def transfer(replica: int, action: Action) -> int:
            source = action.stage - 1 if action.kind == FORWARD else action.stage
            return self.latency.pipeline_ns(costs[replica][action.micro_batch].rows, source)

        simulations = simulate_replicas(
            programs,
            lambda replica, action: durations[replica][action],
            transfer,
            opened_bytes=lambda replica, action: self.step_memory.saved(
                action.stage, costs[replica][action.micro_batch]
            ),
            freed_bytes=lambda replica, action: freed[replica].get(action, 0),
            constant_bytes=self.step_memory.constant(self.state_bytes, costs),
            synchronisation_ns=self.synchronisation_ns,
            shared=meetings_of(replicas),
        )
        return SimulatedReplicas(costs, durations, programs, simulations)

    def _durations(self, costs: Sequence[MicroBatchCost]) -> dict[Action, int]:
        """How long each action of a replica computes, from the costs of its micro-batches."""
        durations = {}
        for stage in range(len(self.stages)):
            for number, cost in enumerate(costs):
                forward, backward = self.action_ns(stage, cost)
                durations[Action(stage, FORWARD, number)] = forward
                durations[Action(stage, BACKWARD, number)] = backward
        return durations

    def _costs(self, replica: ReplicaPlan) -> list[MicroBatchCost]:
        last = {
            (part.document, part.origin): at
            for at, group in enumerate(replica.forward)
            for part in replica.slices_of(group)
        }
        return [
            self.micro_batch(
                (parts := replica.slices_of(group)),
                group.sharding,
                replicas=len(group.replicas),
                kept=any(last[part.document, part.origin] > at for part in parts),
            )
            for at, group in enumerate(replica.forward)
        ]

    def _programs(self, micro_batches: int) -> list[list[Action]]:
        mesh = self.latency.mesh
        return make_programs(self.schedule, mesh.pipeline, micro_batches, mesh.virtual_stages)

    def _programs_of(self, replicas: Sequence[ReplicaPlan]) -> list[list[list[Action]]]:
        ranks, virtual_stages = self.latency.mesh.pipeline, self.latency.mesh.virtual_stages
        return [
            [
                program_of(self.schedule, rank, ranks, virtual_stages, replicas, number)
                for rank in range(ranks)
            ]
            for number in range(len(replicas))
        ]


def _most_open(program: Sequence[Action]) -> int:
    """Most stage passes between their forward and their backward."""
    held = most = 0
    for action in program:
        held += -1 if action.kind == BACKWARD else 1
        most = max(most, held)
    return most
