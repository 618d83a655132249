"""Any legal plan of one replica, from a source of random numbers; and its step on one rank.

Stages are those of one rank, so that inputs of stages exist without a second process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from lightning_wlb.data.batch import StepBatch, make_step_batch
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.distributed.process_groups import NO_GROUPS
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, StepPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.sharding import layout
from lightning_wlb.training.executor import Step
from lightning_wlb.training.pipeline_messages import Messages, PipelineRank
from tests.device import DEVICE
from tests.models.steps import config, documents

SHARDING = "per_document_contiguous"


def random_replica(draw: Random, lengths: Sequence[int], sharding: str = SHARDING) -> ReplicaPlan:
    """Documents of these lengths, cut anywhere.

    Args:
        draw: where randomness comes from.
        lengths: tokens of each document, each a piece.
        sharding: of every micro-batch.
    """
    count = draw.randint(1, 6)
    packs: list[list[Slice]] = [[] for _ in range(count)]
    for document, tokens in enumerate(lengths):
        cuts = draw.sample(range(1, tokens), draw.randint(0, min(tokens - 1, 5)))
        edges = [0, *sorted(cuts), tokens]
        # Neighbouring slices may fall in the same micro-batch.
        chosen = sorted(draw.randrange(count) for _ in edges[1:])
        for start, stop, number in zip(edges[:-1], edges[1:], chosen, strict=True):
            packs[number].append(Slice(document, 0, start, stop))
    slices = [part for pack in packs for part in pack]
    numbers = {part: number for number, part in enumerate(slices)}
    forward = [
        micro_batch([numbers[part] for part in pack], slices, sharding) for pack in packs if pack
    ]
    return ReplicaPlan(tuple(slices), tuple(forward))


def micro_batch(
    members: Sequence[int], slices: Sequence[Slice], sharding: str = SHARDING
) -> MicroBatch:
    """A micro-batch of one replica without context and tensor parallelism."""
    rows = layout(sharding, [slices[index].tokens for index in members], 1, 1).rows
    return MicroBatch(tuple(members), sharding, rows, (0,))


def plan_of(replica: ReplicaPlan, lengths: Sequence[int]) -> StepPlan:
    """The step of one replica that holds whole documents."""
    pieces = tuple(Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths))
    tokens = sum(lengths)
    return StepPlan(0, 0, (replica,), pieces, tokens - len(lengths), tokens, 1, tokens)


def batch_of(
    plan: StepPlan, lengths: Sequence[int], sliding_window: int | None = None
) -> StepBatch:
    """Its tensors on the one rank."""
    store = InMemoryDocuments(documents(lengths), vocab_size=config().vocab_size)
    return make_step_batch(plan, store, Rank(), {}, 0, False, sliding_window).to(DEVICE)


def model_of(
    layers: int = 2,
    sliding_window: int | None = None,
) -> Transformer:
    """A tiny model in float64, the same every time."""
    model = Transformer(
        config(dim=8, heads=2, kv_heads=1, ffn_dim=8, layers=layers, sliding_window=sliding_window),
    ).double()
    model.initialise(3)
    return model.to(DEVICE)


def run_step(model: Transformer, batch: StepBatch, stages: int = 1) -> tuple[Tensor, list[Action]]:
    """Run a step on one rank that has so many virtual stages: all of the model.

    Returns:
        The sum of token losses, and the program. Gradients are in ``.grad``, not divided.
    """
    layers = len(model.layers)
    bounds = [layers * stage // stages for stage in range(stages + 1)]
    pipeline = PipelineRank(
        rank=Rank(Mesh(virtual_stages=stages)),
        stages=tuple(range(a, b) for a, b in pairwise(bounds)),
        schedule="interleaved" if stages > 1 else "1f1b",
        groups={},
        hidden_size=model.config.dim,
        dtype=torch.float64,
        device=DEVICE,
    )
    step = Step(model, pipeline, NO_GROUPS, batch, Messages(pipeline, {}), 1)
    program = program_of(pipeline.schedule, 0, 1, stages, batch.plan.replicas, 0)
    for action in program:
        step.run(action)
    return step.loss, program
