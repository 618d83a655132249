"""Steps on pipelines that differ from step to step and from each other, against one process."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.heterogeneous import parameters
from lightning_wlb.heterogeneous.parameters import ExchangedParameters, _StageInStep
from lightning_wlb.heterogeneous.pipelines import StageSettings
from lightning_wlb.heterogeneous.transfer import Push
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
    # Neighbours of a pipeline share a node, and ranks use other numbers of buckets.
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
MESH, PER_NODE = Mesh(1, 2, 1, 2), 2
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
    targets = sum(store.targets(n, 0, LENGTHS[n]) for n in pieces)
    return StepPlan(
        step, 0, tuple(replicas), tuple(sorted(pieces.values())), targets, WINDOW, 3, 3 * WINDOW,
        schemes=schemes,
    ).validate()  # fmt: skip


def run_of(*steps: int, frozen: tuple[str, ...] = ()) -> Run:
    plans = tuple(map(plan_of, steps))
    return Run(CONFIG, MESH, STAGES, PER_NODE, LENGTHS, plans, frozen)


def recorded(number: int) -> tuple[dict[str, Any], list[bool]]:
    """All steps of a rank, and whether a push of each was posted within an action."""
    posted_within, early = [], []
    post, action = Push.post, ExchangedParameters.action
    running: list[bool] = []

    def posted(self) -> None:
        posted_within.append(bool(running))
        post(self)

    @contextmanager
    def watched(self, each):
        running.append(True)
        with action(self, each):
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

    Push.post, ExchangedParameters.action = posted, watched
    return train(number, run_of(*range(len(STEPS))), after=after), early


def test_gradients_and_parameters_are_those_of_one_process() -> None:
    """A tied weight at both ends, masks, slices, an idle pipeline, two nodes; mesh in between."""
    run = run_of(*range(len(STEPS)))
    want = reference(run)
    of_ranks, early = zip(*run_ranks(recorded, 4, timeout=120), strict=True)
    assert worst_error(run, of_ranks, want) <= 1e-10
    for found in of_ranks:
        np.testing.assert_allclose(found["losses"], want["losses"], rtol=1e-12)
    names = {name for found in of_ranks for name in found["parameters"]}
    assert names == {*want["parameters"], "head.weight"}
    for step, (schemes, dealt) in enumerate(STEPS):
        for number, of_steps in enumerate(early):
            # Pushed early by those whose last micro-batch is their own.
            own = bool(schemes) and (rank_in(schemes, number).data,) in dealt
            assert of_steps[step] == own, (step, number)


VALUES = {"a": torch.ones(2), "b": torch.full((2,), 3.0), "c": torch.full((2,), 5.0)}


class Sent:
    """In place of a push of three turns: what was in each."""

    def __init__(self, redistribution, groups, sums, *_) -> None:
        self.sums, self.turns = sums, []
        assert sums.keys() == {"a", "c"}

    @property
    def next(self) -> int:
        return 2 - len(self.turns)

    def post(self) -> None:
        name = "abc"[self.next]
        self.turns.append(self.sums[name].tolist() if name in self.sums else None)


@pytest.fixture
def live(monkeypatch) -> _StageInStep:
    """Three turns of a parameter each; that of the second one is frozen."""
    modules = {name: nn.Module() for name in VALUES}
    for module in modules.values():
        module.register_parameter("weight", nn.Parameter(torch.empty(2, device="meta")))
    own = SimpleNamespace(buckets=[0, 1, 2], weights=SimpleNamespace(frozen={"b"}))
    places = {name: [(module, "weight")] for name, module in modules.items()}
    pull = SimpleNamespace(
        arrive=lambda turn: {"abc"[turn]: VALUES["abc"[turn]].clone()}, finish=lambda: None
    )
    monkeypatch.setattr(parameters, "Push", Sent)
    sizes = torch.float32, torch.float64, torch.device("cpu")
    stage = SimpleNamespace(waiting={}, places=places, redistribution=own)
    return _StageInStep(stage, pull, None, StageSettings(None, 2, "1f1b", *sizes))  # type: ignore


def loss(live: _StageInStep, *names: str) -> torch.Tensor:
    return sum(live._stage.places[n][0][0].weight.square().sum() for n in names)  # type: ignore


def test_sums_are_held_from_the_first_gradient_to_the_push(live: _StageInStep) -> None:
    live.wait_for_all()
    assert live._sums == {}
    loss(live, "a", "b").backward()
    assert live._sums.keys() == {"a"}
    assert live._sums["a"].dtype == torch.float64
    live.expect_last_gradients(held=False)
    loss(live, "a", "b", "c").backward()
    assert live.finish().turns == [[10.0, 10.0], None, [4.0, 4.0]], "of a twice, of c once"
    assert live._sums == {}


def test_a_gradient_that_comes_too_late_is_refused(live: _StageInStep) -> None:
    live.wait_for_all()
    live.expect_last_gradients(held=False)
    again = loss(live, "c")
    loss(live, "c").backward()
    with pytest.raises(RuntimeError, match=r"c runs, or gets a gradient, after .* were complete"):
        again.backward()
