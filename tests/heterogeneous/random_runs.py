"""Random runs whose steps take other pipelines in turn, and the same in one process.

A :class:`Run` is drawn from a number alone, so that every rank and the reference make the same one:
a model, a mesh with stages of any lengths, nodes, and steps, each of any pieces on pipelines that
split the ranks in any way (the mesh's own too), with any legal plan on each: sliced, of
any shardings, recomputing, with nothing to do, or sharing micro-batches with others that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_wlb.data.batch import StepBatch, make_step_batch
from lightning_wlb.data.store_checks import count_targets
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.distributed.process_groups import mesh_groups
from lightning_wlb.heterogeneous.pipelines import exchange_group
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.setup import HeterogeneousPipelines, weights_of
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import (
    MicroBatch,
    Piece,
    ReplicaPlan,
    Scheme,
    Schemes,
    Slice,
    StepPlan,
    alike,
    schemes_of,
)
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.recompute import recomputing
from lightning_wlb.sharding import SHARDINGS, layout
from lightning_wlb.training.clipping_and_nonfinite import gradient_norm
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.parallelize import add_tied_gradients, parallelize
from lightning_wlb.training.pipeline_messages import PipelineRank
from tests.oracle import oracle
from tests.strategy.harness import relative_error, whole
from tests.strategy.random_plans import random_replica

VOCABULARY = 40
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """What a run is made of; its ranks share nothing else.

    Attributes:
        config: of the model.
        mesh: over which parameters are sharded.
        stages: of the mesh.
        lengths: of all documents.
        plans: of the steps.
        frozen: how the names of parameters begin that are not trained.
    """

    config: TransformerConfig
    mesh: Mesh
    stages: tuple[range, ...]
    lengths: tuple[int, ...]
    plans: tuple[StepPlan, ...]
    frozen: tuple[str, ...] = ()

    def model(self) -> Transformer:
        """Whole, without memory under the meta device."""
        model = Transformer(self.config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        return model

    @property
    def of_mesh(self) -> Schemes:
        """The mesh as schemes."""
        return schemes_of(self.mesh, self.stages)

    @property
    def store(self) -> InMemoryDocuments:
        """The documents."""
        return documents(self.lengths)


def documents(lengths: Sequence[int]) -> InMemoryDocuments:
    """The same random ones on every call, with masks."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, VOCABULARY, length) for length in lengths]
    masks = [draw.random(length) < 0.7 for length in lengths]
    masks[0][:] = True  # some gradient in every step
    return InMemoryDocuments(texts, masks, vocab_size=VOCABULARY)


def random_scheme(
    draw: Random, config: TransformerConfig, first: int, ranks: int, divides: bool = False
) -> Scheme:
    """Any pipeline on some of the ranks from ``first`` on."""
    while True:
        depth = draw.randint(1, config.layers)
        context, tensor = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 4))
        size = depth * context * tensor
        if size <= ranks - first and not (divides and ranks % size):
            cuts = sorted(draw.sample(range(1, config.layers), depth - 1))
            ends = zip([0, *cuts], [*cuts, config.layers], strict=True)
            return Scheme(first, tuple(stop - start for start, stop in ends), context, tensor)


def random_run(seed: int, ranks: int, steps: int = 4) -> Run:
    """Any run on so many ranks; every other run has tied embeddings."""
    draw = Random(seed)
    kv_heads = draw.choice((1, 2, 4))
    config = TransformerConfig(
        dim=16,
        layers=draw.randint(1, 4),
        heads=4,
        kv_heads=kv_heads,
        ffn_dim=24,
        vocab_size=VOCABULARY,
        tied_embeddings=seed % 2 == 0,
        sliding_window=draw.choice((None, None, 6)),
    )
    of_mesh = random_scheme(draw, config, 0, ranks, divides=True)
    mesh = Mesh(ranks // of_mesh.size, len(of_mesh.stages), of_mesh.context, of_mesh.tensor)
    lengths = (17, *(draw.choice((1, 2, 3, 5, 8, 13, 24)) for _ in range(9)))
    own, plans = schemes_of(mesh, of_mesh.layers), []
    for step in range(steps):
        strategy: list[Scheme] = []
        while (first := sum(each.size for each in strategy)) < ranks:
            strategy.append(random_scheme(draw, config, first, ranks))
        on_mesh = step == steps - 2 or tuple(strategy) == own
        made = own if on_mesh else tuple(strategy)
        plan = _plan(draw, step, made, lengths)
        plans.append(replace(plan, schemes=() if on_mesh else made).validate())
    frozen: tuple[str, ...] = ()
    if seed % 3 == 0:
        frozen = ("embed.", *(f"layers.{layer}." for layer in range(draw.randrange(config.layers))))
    return Run(config, mesh, of_mesh.layers, lengths, tuple(plans), frozen)


def _plan(draw: Random, step: int, strategy: Schemes, lengths: Sequence[int]) -> StepPlan:
    """Any plan for some documents, the first among them; pipelines may be left without any."""
    chosen = [0, *(n for n in range(1, len(lengths)) if draw.random() < 0.6)]
    members = draw.choice([(), *_sets(strategy)])
    both = [document for document in chosen if members and draw.random() < 0.4]
    shared = [(pack, members) for pack in _packs(draw, both, lengths)]
    dealt: list[list[int]] = [[] for _ in strategy]
    for document in chosen:
        if document not in both:
            draw.choice(dealt).append(document)
    seed = draw.random()  # what is shared is laid out alike on all that share it
    replicas = []
    for number, (scheme, own) in enumerate(zip(strategy, dealt, strict=True)):
        if shared and number in members:
            packs = _packs(draw, own, lengths)
            shard = partial(_laid_out, Random(seed), scheme)
            plan = with_rows(replica_plan(packs, number, "", shared), shard)
            (made,) = recomputing([plan], "selective")
            replicas.append(made)
        else:
            replicas.append(_replica(draw, number, scheme, own, lengths))
    pieces = tuple(Piece(document, 0, lengths[document], step) for document in chosen)
    store = documents(lengths)
    targets = sum(count_targets(store, each.document, 0, each.stop) for each in pieces)
    cap = sum(lengths)
    return StepPlan(step, 0, tuple(replicas), pieces, targets, cap, 1, cap)


def with_rows(
    plan: ReplicaPlan, shard: Callable[[Sequence[Slice], int], tuple[str, int]]
) -> ReplicaPlan:
    """A symmetric plan with shardings and rows; ``shard`` is told who share a micro-batch."""
    made = []
    for each in plan.forward:
        name, rows = shard(plan.slices_of(each), len(each.replicas))
        made.append(replace(each, sharding=name, rows=rows))
    return ReplicaPlan(plan.slices, tuple(made))


def _replica(
    draw: Random, number: int, scheme: Scheme, own: Sequence[int], lengths: Sequence[int]
) -> ReplicaPlan:
    if not own:
        return ReplicaPlan((), ())
    made = random_replica(draw, [lengths[document] for document in own])
    slices = tuple(part._replace(document=own[part.document]) for part in made.slices)

    def laid_out(each: MicroBatch) -> MicroBatch:
        name, rows = _laid_out(draw, scheme, [slices[index] for index in each.slices], 1)
        return replace(each, sharding=name, rows=rows, replicas=(number,))

    placed = replace(made.changed(laid_out), slices=slices)
    (recomputed,) = recomputing([placed], draw.choice(MODES))
    return recomputed


def _laid_out(
    draw: Random, scheme: Scheme, slices: Sequence[Slice], pipelines: int
) -> tuple[str, int]:
    """Any sharding of a micro-batch, and its rows."""
    name = draw.choice(list(SHARDINGS))
    lengths = [each.tokens for each in slices]
    return name, layout(name, lengths, scheme.context * pipelines, scheme.tensor).rows


def _sets(strategy: Schemes) -> list[tuple[int, ...]]:
    """Pipelines that may share micro-batches: aligned ranges of those that are alike."""
    return [
        tuple(numbers[first : first + size])
        for numbers in alike(strategy).values()
        for size in (2, 4)
        for first in range(0, len(numbers) - size + 1, size)
    ]


def _packs(draw: Random, own: Sequence[int], lengths: Sequence[int]) -> list[list[Slice]]:
    """Documents cut anywhere, in at most three micro-batches."""
    packs: list[list[Slice]] = [[], [], []]
    for document in own:
        tokens = lengths[document]
        cuts = sorted(draw.sample(range(1, tokens), draw.randint(0, min(tokens - 1, 2))))
        places = sorted(draw.randrange(3) for _ in range(len(cuts) + 1))
        ends = zip([0, *cuts], [*cuts, tokens], strict=True)
        for (start, stop), place in zip(ends, places, strict=True):
            packs[place].append(Slice(document, 0, start, stop))
    return [pack for pack in packs if pack]


def executor_of(run: Run, number: int, dtype: torch.dtype) -> Executor:
    """A rank's, on the mesh and on other pipelines; shards are in float64 or float32."""

    def build() -> Transformer:
        with torch.device("meta"):
            return run.model()

    model, rank = build(), run.mesh.coordinate(number)
    tensors = {s.tensor for plan in run.plans for s in (*run.of_mesh, *plan.schemes)}
    weights = weights_of(model, sorted(tensors))
    groups = mesh_groups(rank, CPU, None)
    wide = torch.promote_types(dtype, torch.float32)
    gathering = parallelize(
        model,
        groups.mesh,
        list(run.stages),
        groups.parameters,
        initialise=lambda: model.initialise(7),
        device=CPU,
        dtype=wide,
        compute_dtype=dtype,
        sum_dtype=wide,
    )
    pipeline = PipelineRank(rank, run.stages, "1f1b", groups.channels, run.config.dim, dtype, CPU)
    made = Executor(model, pipeline, groups, gathering)
    redistribute = partial(Redistribution, weights, run.of_mesh, rank=number)
    exchanging = exchange_group(number, run.mesh.devices, CPU)
    made.heterogeneous = HeterogeneousPipelines(made, build, redistribute, exchanging)
    return made


def train(
    number: int,
    run: Run,
    dtype: torch.dtype = torch.float64,
    after: Callable[[int, Executor, StepBatch], None] = lambda *_: None,
) -> dict[str, Any]:
    """All steps of a rank: losses, gradients, and parameters after clipped AdamW.

    ``after`` is called behind each step, with its number.
    """
    runner = executor_of(run, number, dtype)
    model, rank, store = runner.model, run.mesh.coordinate(number), run.store
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tied = model.tied
    copies = [p for n, p in model.named_parameters() if n in tied]
    losses, gradients = [], []
    for step, plan in enumerate(run.plans):
        batch = make_step_batch(
            plan, store, plan.place(rank), {}, 0, False, run.config.sliding_window
        )
        losses.append(runner.run(batch, plan.target_tokens).item())
        runner.finish()
        if runner.bucket_lifetimes is runner.parameters:
            add_tied_gradients(model, rank, runner.groups.pipeline)
        runner.read()
        trained = {n: each for n, each in model.named_parameters() if each.requires_grad}
        gradients.append({name: whole(each.grad) for name, each in trained.items()})
        norm = gradient_norm(model.parameters(), CPU, copies)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        optimizer.step()
        after(step, runner, batch)
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "parameters": parameters}


def reference(run: Run) -> dict[str, Any]:
    """The same in one process, of documents by themselves."""
    model, store = run.model().double(), run.store
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(True)  # which the oracle asks for
    model.initialise(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = [store.read(n, 0, length) for n, length in enumerate(run.lengths)]
    masks = [store.mask(n, 0, length) for n, length in enumerate(run.lengths)]
    losses, gradients = [], []
    for plan in run.plans:
        pieces = [piece[:3] for piece in plan.pieces]
        total, found = oracle(model, texts, pieces, masks)
        targets = plan.target_tokens
        losses.append(total / targets)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name] / targets if name in trained else None
        gradients.append({name: (each / targets).numpy() for name, each in found.items()})
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    parameters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "parameters": parameters}


def worst_error(run: Run, of_ranks: Sequence[dict[str, Any]], want: dict[str, Any]) -> float:
    """The largest relative error of a loss, gradient or parameter of any rank.

    Copies of a parameter, of tensor-parallel ranks or at both ends, must have the same bits.
    """
    tied = Transformer(run.config).tied
    worst, known = 0.0, {}
    for found in of_ranks:
        for name, value in found["parameters"].items():
            first = known.setdefault(tied.get(name, name), value)
            np.testing.assert_array_equal(value, first, name)
        for got, right in zip(found["losses"], want["losses"], strict=True):
            worst = max(worst, abs(got - right) / abs(right))
        for got, right in zip(
            [*found["gradients"], found["parameters"]],
            [*want["gradients"], want["parameters"]],
            strict=True,
        ):
            for name, value in got.items():
                worst = max(worst, relative_error(value, right[tied.get(name, name)]))
    return worst
