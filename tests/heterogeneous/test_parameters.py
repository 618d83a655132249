"""Steps on pipelines that differ from step to step and from each other, against one process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.data.store_checks import count_targets
from lightning_wlb.heterogeneous.parameters import ExchangedParameters, _ExchangedBucket
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import Piece, Scheme, Schemes, StepPlan, rank_in, schemes_of
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import slice_pieces
from lightning_wlb.sharding import layout
from tests.heterogeneous.random_runs import (
    VOCABULARY,
    Run,
    documents,
    reference,
    train,
    with_rows,
    worst_error,
)
from tests.ranks import run_ranks

Dealt = dict[tuple[int, ...], tuple[int, ...]]
"""The pipelines that share documents -> these documents; of one pipeline its own."""

WINDOW = 24
LENGTHS = (13, 1, 2, 7, 24, 3, 22, 17, 9, 5)
ALONE = (Scheme(0, (3,)), Scheme(1, (3,)), Scheme(2, (3,)), Scheme(3, (3,)))
STEPS: tuple[tuple[Schemes, Dealt], ...] = (
    # Ranks use other numbers of buckets.
    ((Scheme(0, (3,), tensor=2), Scheme(2, (1, 2))), {(0,): (4, 0, 2), (1,): (6, 3, 1)}),
    ((Scheme(0, (3,), context=2), *ALONE[2:]), {(0,): (6,), (1,): (7,), (2,): (5,)}),
    ((Scheme(0, (3,), tensor=4),), {(0,): (2, 8, 9)}),  # keys and values are whole on every rank
    ((), {(0,): (6, 4, 1)}),  # on the mesh
    ((Scheme(0, (2, 1)), Scheme(2, (3,), context=2)), {(0,): (4,)}),  # one has nothing to do
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
STAGES = (range(2), range(2, 3))
MESH = Mesh(1, 2, 1, 2)
OF_MESH = schemes_of(MESH, STAGES)
CONFIG = TransformerConfig(
    dim=16, layers=3, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCABULARY, tied_embeddings=True
)


def plan_of(step: int) -> StepPlan:
    """Every document in slices."""
    schemes, dealt = STEPS[step]
    pieces = {n: Piece(n, 0, LENGTHS[n], step) for own in dealt.values() for n in own}
    packs = {
        members: slice_pieces([pieces[n] for n in own], 3, WINDOW, PassWork(2, 2), tile=4, least=4)
        for members, own in dealt.items()
    }
    shared = [(pack, members) for members in packs if len(members) > 1 for pack in packs[members]]
    replicas = []
    for number, scheme in enumerate(schemes or OF_MESH):

        def shard(slices, members, scheme=scheme):
            name, lengths = "per_document_contiguous", [each.tokens for each in slices]
            return name, layout(name, lengths, scheme.context * members, scheme.tensor).rows

        plan = replica_plan(packs.get((number,), []), number, "", shared)
        replicas.append(with_rows(plan, shard))
    store = documents(LENGTHS)
    targets = sum(count_targets(store, n, 0, LENGTHS[n]) for n in pieces)
    return StepPlan(
        step, 0, tuple(replicas), tuple(sorted(pieces.values())), targets, WINDOW, 3, 3 * WINDOW,
        schemes=schemes,
    ).validate()  # fmt: skip


def run_of(*steps: int, frozen: tuple[str, ...] = ()) -> Run:
    plans = tuple(map(plan_of, steps))
    return Run(CONFIG, MESH, STAGES, LENGTHS, plans, frozen)


# Shards of four replicas, and no tied weight.
REPLICAS = Run(
    replace(CONFIG, tied_embeddings=False), Mesh(4), (range(3),), LENGTHS,
    tuple(map(plan_of, (0, 1, 2))),
)  # fmt: skip


def recorded(number: int) -> tuple[dict[str, Any], list[bool], dict[str, Any]]:
    """All steps of a rank, whether a push of each was posted within an action; of replicas too."""
    posted_within, early = [], []
    post, action = _ExchangedBucket.reduce, ExchangedParameters.action
    running: list[bool] = []

    def posted(self) -> None:
        posted_within.append(bool(running))
        post(self)

    @contextmanager
    def watched(self, each):
        with action(self, each):
            running.append(True)
            yield
            running.pop()

    def after(step: int, runner, batch) -> None:
        early.append(any(posted_within))
        posted_within.clear()
        if step < len(STEPS) - 1:
            return
        handle = next(runner.model.parameters()).register_hook(lambda gradient: gradient)
        with pytest.raises(ValueError, match=r"has a hook \(register_hook or .* would never run"):
            runner.run(batch, 1)
        handle.remove()
        runner.heterogeneous = None
        with pytest.raises(ValueError, match=f"step {step} is planned for pipelines of its own"):
            runner.run(batch, 1)

    _ExchangedBucket.reduce, ExchangedParameters.action = posted, watched
    found = train(number, run_of(*range(len(STEPS))), after=after)
    return found, early.copy(), train(number, REPLICAS)


def test_gradients_and_parameters_are_those_of_one_process() -> None:
    """A tied weight at both ends, masks, slices, an idle pipeline; mesh in between."""
    run = run_of(*range(len(STEPS)))
    want = reference(run)
    of_ranks, early, replicas = zip(*run_ranks(recorded, 4, timeout=120), strict=True)
    assert worst_error(run, of_ranks, want) <= 1e-10
    assert worst_error(REPLICAS, replicas, reference(REPLICAS)) <= 1e-10
    for found in of_ranks:
        np.testing.assert_allclose(found["losses"], want["losses"], rtol=1e-12)
    names = {name for found in of_ranks for name in found["parameters"]}
    assert names == {*want["parameters"], "head.weight"}
    for step, (schemes, dealt) in enumerate(STEPS):
        for number, of_steps in enumerate(early):
            # Pushed early by those whose last micro-batch is their own.
            own = bool(schemes) and (rank_in(schemes, number).data,) in dealt
            assert of_steps[step] == own, (step, number)
