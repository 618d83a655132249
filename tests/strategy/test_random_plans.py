"""Any legal plan runs with the gradients of dense attention."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.plan import Slice, StepPlan
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.recompute import recomputing
from tests.models.steps import documents
from tests.oracle import oracle, relative_error
from tests.strategy.random_plans import batch_of, model_of, plan_of, random_replica, run_step

KINDS = ("symmetric", "asymmetric")
# With only shorter documents some gradients would be zero but for rounding.
LENGTHS = st.lists(st.integers(1, 12), max_size=4).map(lambda lengths: [7, *lengths])
RANDOM = st.randoms(use_true_random=False)


def tokens_of(part: Slice) -> list[tuple[int, int]]:
    return [(part.document, token) for token in range(part.start, part.stop)]


@given(LENGTHS, RANDOM, st.sampled_from(KINDS), st.sampled_from([1, 2]), st.sampled_from([None, 4]))
@settings(max_examples=15)
def test_legal_plans_run_with_the_gradients_of_dense_attention(lengths, draw, kind, stages, window):
    replica = random_replica(draw, lengths, kind)
    (replica,) = recomputing([replica], MODES[len(lengths) % 3])
    plan = plan_of(replica, lengths).validate()
    assert StepPlan.from_json(plan.to_json()) == plan
    batch = batch_of(plan, lengths, window)
    model = model_of(sliding_window=window)
    loss, program = run_step(model, batch, stages)

    for groups in (batch.units.forward, batch.units.backward):
        run = Counter(
            token
            for each in groups
            for part in replica.slices_of(each)
            for token in tokens_of(part)
        )
        assert run == {(d, t): 1 for d, length in enumerate(lengths) for t in range(length)}
    assert len(program) == stages * (len(batch.units.forward) + len(batch.units.backward))

    pieces = [(document, 0, length) for document, length in enumerate(lengths)]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    want, expected = oracle(model_of(sliding_window=window), documents(lengths), pieces)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    for name, reference in expected.items():
        found = gradients[name]
        error = relative_error(torch.zeros_like(reference) if found is None else found, reference)
        assert error <= 1e-10, name
