"""Every registered packing method keeps the promises, also on streams made to break it.

Nothing is lost, the cap holds, runs resume exactly from any step, pieces do not wait for ever, and
no stream crashes or starves a method. tests/planning/test_planner.py draws streams at random.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing import PACKINGS

METHODS = sorted(PACKINGS)


WORK = Work(PassWork(33, 2), PassWork(67, 5))


def planner(lengths, data: DataSettings, mesh: Mesh | None = None) -> Planner:
    return Planner(lengths, data, WORK, mesh or Mesh())


def packing(method: str, **options) -> dict:
    """The method with those of the options that it has."""
    known = {field.name for field in fields(PACKINGS[method].Options)}
    return {"method": method} | {name: options[name] for name in known & set(options)}


def epoch(planner: Planner, most: int = 3000) -> list[StepPlan]:
    plans = []
    while (plan := planner.next_step()) is not None:
        plans.append(plan)
        assert len(plans) < most, "an epoch that does not end"
    return plans


def check_epoch(lengths, plans: list[StepPlan], data: DataSettings) -> None:
    """Conservation and cap; StepPlan.validate has checked that slices cover the pieces."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for plan in plans:
        assert plan.validate() is plan
        assert plan.tokens > 0
        for replica in plan.replicas:
            for micro_batch in replica.forward:
                assert micro_batch.slices
                assert replica.tokens_of(micro_batch) <= data.token_cap
        for piece in plan.pieces:
            assert piece.tokens <= data.context_window
            covered.setdefault(piece.document, []).append((piece.origin, piece.stop))
    for document, length in enumerate(lengths):
        at = 0
        for origin, stop in sorted(covered.get(document, [])):
            assert origin == at
            at = stop
        assert at == length


WINDOW = 64
MAX_AGE = 12  # steps; the default of the methods that have one
STREAMS = {
    "all at the cap": [WINDOW] * 40,
    "just above half the cap": [49] * 60,  # cap 96: two do not fit
    "all one token": [1] * 1500,
    "one giant among dust": [1] * 700 + [WINDOW] + [1] * 700,
    "alternating": [WINDOW, 1] * 40,
    "alternating thirds": [22, 43] * 40,
    "long ones last": [2] * 400 + [WINDOW] * 12,
    "empty global batches": [WINDOW * 30, 3, WINDOW * 25 + 1] + [5] * 50,
    "fewer documents than micro-batches": [7, 3],
    "one document": [1],
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STREAMS)
def test_adversarial_streams(method, name) -> None:
    lengths = STREAMS[name]
    count = 4
    chosen = packing(method, packing_window=2)
    data = DataSettings(WINDOW, count, packing=chosen, shuffle=False)
    mesh = Mesh(data=2, pipeline=3)
    plans = epoch(planner(lengths, data, mesh))
    check_epoch(lengths, plans, data)
    # A document of many global batches takes as many steps; everything else goes within its age.
    burst = math.ceil(max(lengths) / data.nominal_tokens)
    age = MAX_AGE + chosen.get("packing_window", 1) + 2 * burst
    assert max(plan.max_delay for plan in plans) <= age
    # Not starved: a step has its share of tokens on average, but for what cannot be shared out.
    assert len(plans) <= 3 * math.ceil(sum(lengths) / data.nominal_tokens) + MAX_AGE


@pytest.mark.parametrize("method", METHODS)
def test_resume_from_every_step(method) -> None:
    generator = np.random.default_rng(5)
    lengths = np.minimum(generator.lognormal(2.5, 1.2, 150).astype(int) + 1, 100).tolist()
    data = DataSettings(WINDOW, 3, packing=packing(method, packing_window=2, max_age=5))
    whole = planner(lengths, data)
    states = [json.loads(json.dumps(whole.state_dict()))]
    plans = []
    while (plan := whole.next_step()) is not None:
        plans.append(plan)
        states.append(json.loads(json.dumps(whole.state_dict())))
    check_epoch(lengths, plans, data)
    assert len(plans) > 6
    for at, state in enumerate(states[:-1]):
        resumed = planner(lengths, data)
        resumed.load_state_dict(state)
        assert resumed.next_step() == plans[at], f"resumed at step {at}"


@pytest.mark.parametrize("method", METHODS)
def test_order_of_documents_that_do_not_wait(method) -> None:
    """Steps take documents in the epoch's order: none overtakes by more than may wait."""
    lengths = [20] * 60  # all alike, all below the share that waits
    chosen = packing(method, packing_window=1)
    data = DataSettings(200, 2, packing=chosen, shuffle=False)
    plans = epoch(planner(lengths, data))
    for before, after in pairwise(plans):
        assert max(piece.document for piece in before.pieces) <= min(
            piece.document for piece in after.pieces
        )
        assert max(piece.stop for piece in before.pieces) <= 20
