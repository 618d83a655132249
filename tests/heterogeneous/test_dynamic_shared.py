"""Micro-batches that pipelines share where they are alike, beside others that are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.heterogeneous.parameters import Linked
from lightning_wlb.heterogeneous.transfer import Push
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Piece, Scheme, Schemes, StepPlan, rank_in
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import slice_pieces
from lightning_wlb.sharding import layout
from tests.heterogeneous.test_runtime import LENGTHS, WINDOW, config, documents, executor
from tests.oracle import oracle
from tests.ranks import run_ranks
from tests.strategy.harness import relative_error, whole

Dealt = dict[tuple[int, ...], tuple[int, ...]]
"""The pipelines that share documents -> these documents; of one pipeline its own."""

ALONE = (Scheme(0, (3,)), Scheme(1, (3,)), Scheme(2, (3,)), Scheme(3, (3,)))
STEPS: tuple[tuple[Schemes, Dealt], ...] = (
    # One of the two has nothing else to do: it may not push in front of the other's own.
    ((Scheme(0, (1, 2)), *ALONE[2:]), {(1, 2): (4,), (0,): (6, 1), (2,): (8, 5)}),
    # The two are not neighbours.
    ((ALONE[0], Scheme(1, (3,), tensor=2), ALONE[3]), {(0, 2): (6,), (1,): (2, 3), (0,): (5,)}),
    ((Scheme(0, (3,), context=2), Scheme(2, (3,), context=2)), {(0, 1): (4, 7), (1,): (9,)}),
    ((Scheme(0, (2, 1)), Scheme(2, (2, 1))), {(0, 1): (4,), (0,): (7, 2), (1,): (8,)}),
    # Sets of two sizes, and a pipeline that has no part in the smaller one; then one without work.
    (ALONE, {(0, 1, 2, 3): (4,), (2, 3): (6,), (0,): (8,), (3,): (1,)}),
    (ALONE, {(2, 3): (6,), (0,): (5,)}),
)


def plan_of(step: int, strategy: Schemes, dealt: Dealt, store) -> StepPlan:
    """Every document in slices."""
    pieces = {n: Piece(n, 0, LENGTHS[n], step) for own in dealt.values() for n in own}
    packs = {
        members: slice_pieces([pieces[n] for n in own], 3, WINDOW, PassWork(2, 2), tile=4, least=4)
        for members, own in dealt.items()
    }
    shared = [(pack, members) for members in packs if len(members) > 1 for pack in packs[members]]
    replicas = []
    for number, scheme in enumerate(strategy):

        def shard(slices, members, scheme=scheme):
            name, lengths = "per_document_contiguous", [each.tokens for each in slices]
            return name, layout(name, lengths, scheme.context * members, scheme.tensor).rows

        replicas.append(replica_plan(packs.get((number,), []), number, shard, shared))
    targets = sum(store.targets(n, 0, LENGTHS[n]) for n in pieces)
    return StepPlan(
        step, 0, tuple(replicas), tuple(sorted(pieces.values())), targets, WINDOW, 3, 3 * WINDOW,
        schemes=strategy,
    ).validate()  # fmt: skip


def train(number: int) -> list[tuple[float, dict[str, np.ndarray], bool]]:
    """Of every step the loss, the gradients, and whether a push was posted within an action."""
    runner, _ = executor(number)
    store, found, within = documents(), [], []
    post, action = Push.post, Linked.action
    running: list[bool] = []

    def posted(self) -> None:
        within.append(bool(running))
        post(self)

    @contextmanager
    def watched(self, each):
        running.append(True)
        with action(self, each):
            yield
        running.pop()

    Push.post, Linked.action = posted, watched
    for step, (strategy, dealt) in enumerate(STEPS):
        plan = plan_of(step, strategy, dealt, store)
        batch = make_step_batch(plan, store, rank_in(strategy, number), {}, 0, False)
        loss = runner.run(batch, plan.target_tokens).item()
        runner.finish()
        gradients = {n: whole(p.grad) for n, p in runner.model.named_parameters()}
        found.append((loss, gradients, any(within)))
        within.clear()
    return found


def reference(own: Sequence[int]) -> tuple[float, dict[str, np.ndarray]]:
    """In one process, of documents by themselves."""
    model, store = Transformer(config()).double(), documents()
    model.initialise(7)
    texts = [store.read(n, 0, length) for n, length in enumerate(LENGTHS)]
    masks = [store.mask(n, 0, length) for n, length in enumerate(LENGTHS)]
    targets = sum(store.targets(n, 0, LENGTHS[n]) for n in own)
    total, found = oracle(model, texts, [(n, 0, LENGTHS[n]) for n in own], masks)
    return total / targets, {name: (each / targets).numpy() for name, each in found.items()}


def test_gradients_are_those_of_one_process() -> None:
    of_ranks = run_ranks(train, 4, timeout=120)
    for step, (strategy, dealt) in enumerate(STEPS):
        loss, want = reference([n for own in dealt.values() for n in own])
        for number, of_steps in enumerate(of_ranks):
            got, gradients, early = of_steps[step]
            assert abs(got / loss - 1) <= 1e-12
            for name, value in gradients.items():
                tied = "embed.weight" if name == "head.weight" else name
                assert relative_error(value, want[tied]) <= 1e-10, (step, name)
            # Pushed early by those whose last micro-batch is their own.
            assert early == ((rank_in(strategy, number).data,) in dealt), (step, number)
