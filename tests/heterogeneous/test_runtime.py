"""Steps on pipelines that differ from step to step and from each other, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.distributed.process_groups import mesh_groups
from lightning_wlb.heterogeneous.pipelines import Settings
from lightning_wlb.heterogeneous.planning.exchanges import Links
from lightning_wlb.heterogeneous.setup import Elsewhere
from lightning_wlb.heterogeneous.transfer import travel_groups, weights_of
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Piece, Scheme, Schemes, StepPlan, rank_in, schemes_of
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import slice_pieces
from lightning_wlb.sharding import layout
from lightning_wlb.training.clipping_and_nonfinite import gradient_norm
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.messages import PipelineRank
from lightning_wlb.training.parallelize import parallelize
from lightning_wlb.training.tied_weights import Tie, add_tied_gradients
from tests.oracle import oracle
from tests.ranks import run_ranks
from tests.strategy.harness import relative_error, whole

VOCABULARY, WINDOW = 32, 24
LENGTHS = (1, 2, 13, 7, 24, 3, 22, 17, 9, 5)
STRATEGIES: tuple[tuple[Schemes, tuple[int, ...]], ...] = (  # and the documents of the step
    ((Scheme(0, (3,), tensor=2), Scheme(2, (1, 2))), (0, 1, 2, 3, 4, 6)),
    ((Scheme(0, (3,), context=2), Scheme(2, (3,)), Scheme(3, (3,))), (5, 6, 7)),
    ((Scheme(0, (3,), tensor=4),), (2, 8, 9)),  # key and value heads are whole on every rank
    ((), (1, 4, 6)),  # on the mesh
    ((Scheme(0, (2, 1)), Scheme(2, (3,), context=2)), (4,)),  # one pipeline has nothing to do
)
STAGES = (range(2), range(2, 3))
MESH, PER_NODE = Mesh(1, 2, 1, 2), 2
OF_MESH = schemes_of(MESH, STAGES)


def config() -> TransformerConfig:
    return TransformerConfig(
        dim=16, layers=3, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCABULARY,
        tied_embeddings=True,
    )  # fmt: skip


def documents() -> InMemoryDocuments:
    draw = np.random.default_rng(0)
    masks = [draw.random(length) < 0.7 for length in LENGTHS]
    return InMemoryDocuments(
        [draw.integers(0, VOCABULARY, n) for n in LENGTHS], masks, vocab_size=VOCABULARY
    )


def plan_of(step: int, strategy: Schemes, own: Sequence[int], store) -> StepPlan:
    """Pieces dealt in turn, the longest first; in slices."""
    pieces = sorted((Piece(n, 0, LENGTHS[n], step) for n in own), key=lambda p: -p.tokens)
    replicas = []
    for number, scheme in enumerate(strategy):

        def shard(slices, members, scheme=scheme):
            name = "per_document_contiguous"
            lengths = [each.tokens for each in slices]
            return name, layout(name, lengths, scheme.context, scheme.tensor).rows

        mine = pieces[number :: len(strategy)]
        packs = slice_pieces(mine, 3, WINDOW, PassWork(2, 2), tile=4, least=4) if mine else []
        replicas.append(replica_plan(packs, number, shard))
    targets = sum(store.targets(piece.document, 0, piece.stop) for piece in pieces)
    return StepPlan(
        step, 0, tuple(replicas), tuple(sorted(pieces)), targets, WINDOW, 3, 3 * WINDOW,
        schemes=strategy,
    ).validate()  # fmt: skip


def executor(number: int, frozen: tuple[str, ...] = ()) -> tuple[Executor, list[Tie]]:
    """This rank's, on the mesh and elsewhere; ``frozen``: how names begin that are not trained."""

    def build() -> Transformer:
        with torch.device("meta"):
            return Transformer(config())

    model, rank, device = build(), MESH.coordinate(number), torch.device("cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    weights = weights_of(model, (1, 2, 4))
    groups = mesh_groups(rank, device, None)
    ties, gathering = parallelize(
        model, groups.mesh, list(STAGES), groups.parameters,
        initialise=lambda: model.initialise(7), device=device,
        dtype=torch.float64, compute_dtype=torch.float64, sum_dtype=torch.float64,
    )  # fmt: skip
    sizes = config().dim, torch.float64, device
    pipeline = PipelineRank(rank, STAGES, "1f1b", groups.channels, *sizes)
    made = Executor(model, pipeline, groups, gathering)
    links = Links(weights, OF_MESH, number, PER_NODE)
    settings = Settings(build, sizes[0], "1f1b", torch.float64, torch.float64, device)
    made.heterogeneous = Elsewhere(model, links, travel_groups(number, 4, PER_NODE, None), settings)
    return made, ties


def train(number: int) -> dict:
    """All strategies in turn: losses, gradients, parameters after clipped AdamW."""
    runner, ties = executor(number)
    model, rank = runner.model, MESH.coordinate(number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    elsewhere = [p for n, p in model.named_parameters() if n in model.tied]
    losses, gradients, store = [], [], documents()
    for step, (strategy, own) in enumerate(STRATEGIES):
        plan = replace(plan_of(step, strategy or OF_MESH, own, store), schemes=strategy)
        here = rank_in(strategy, number) if strategy else rank
        batch = make_step_batch(plan, store, here, {}, 0, False)
        losses.append(runner.run(batch, plan.target_tokens).item())
        runner.finish()
        if not strategy:
            peer = rank.group("pipeline")[-1 if rank.first_stage else 0]
            add_tied_gradients(model, ties, peer, runner.groups.pipeline)
        gradients.append({n: whole(p.grad) for n, p in model.named_parameters()})
        norm = gradient_norm(model.parameters(), torch.device("cpu"), elsewhere)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        optimizer.step()
    with pytest.raises(ValueError, match="step 4 has the strategy of the mesh"):
        runner.heterogeneous(replace(plan, schemes=OF_MESH))
    handle = next(model.parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"has a hook \(register_hook or .* would never run"):
        runner.run(batch, 1)
    handle.remove()
    runner.heterogeneous = None
    with pytest.raises(ValueError, match="step 4 is planned for pipelines of its own"):
        runner.run(batch, 1)
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": {name: whole(p) for name, p in model.named_parameters()},
    }


def reference() -> dict:
    """The same in one process, of documents by themselves."""
    model = Transformer(config()).double()
    model.initialise(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store, losses, gradients = documents(), [], []
    texts = [store.read(n, 0, length) for n, length in enumerate(LENGTHS)]
    masks = [store.mask(n, 0, length) for n, length in enumerate(LENGTHS)]
    for _, own in STRATEGIES:
        targets = sum(store.targets(number, 0, LENGTHS[number]) for number in own)
        total, found = oracle(model, texts, [(n, 0, LENGTHS[n]) for n in own], masks)
        losses.append(total / targets)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name] / targets
        gradients.append({name: (each / targets).numpy() for name, each in found.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    parameters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "parameters": parameters}


def test_gradients_and_parameters_are_those_of_one_process() -> None:
    """A tied weight at both ends, masks, slices, an idle pipeline, two nodes; mesh in between."""
    want, of_ranks = reference(), run_ranks(train, 4, timeout=120)
    for found in of_ranks:
        np.testing.assert_allclose(found["losses"], want["losses"], rtol=1e-12)
        for got, right in zip(
            [*found["gradients"], found["parameters"]],
            [*want["gradients"], want["parameters"]],
            strict=True,
        ):
            for name, value in got.items():
                tied = "embed.weight" if name == "head.weight" else name
                assert relative_error(value, right[tied]) <= 1e-10, name
    names = {name for found in of_ranks for name in found["parameters"]}
    assert names == {*want["parameters"], "head.weight"}
