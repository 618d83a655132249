"""Any legal plan runs with the gradients of dense attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.recompute import recomputing
from tests.models.steps import documents
from tests.oracle import oracle, relative_error
from tests.strategy.random_plans import batch_of, model_of, plan_of, random_replica, run_step

# With only shorter documents some gradients would be zero but for rounding.
LENGTHS = st.lists(st.integers(1, 12), max_size=4).map(lambda lengths: [7, *lengths])
RANDOM = st.randoms(use_true_random=False)


@given(LENGTHS, RANDOM, st.sampled_from([1, 2]), st.sampled_from([None, 4]))
@settings(max_examples=15)
def test_legal_plans_run_with_the_gradients_of_dense_attention(lengths, draw, stages, window):
    replica = random_replica(draw, lengths)
    (replica,) = recomputing([replica], MODES[len(lengths) % 3])
    plan = plan_of(replica, lengths).validate()
    assert StepPlan.from_json(plan.to_json()) == plan
    batch = batch_of(plan, lengths, window)
    model = model_of(sliding_window=window)
    loss, program = run_step(model, batch, stages)

    assert len(program) == 2 * stages * len(replica.forward)

    pieces = [(document, 0, length) for document, length in enumerate(lengths)]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    want, expected = oracle(model_of(sliding_window=window), documents(lengths), pieces)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    for name, reference in expected.items():
        found = gradients[name]
        error = relative_error(torch.zeros_like(reference) if found is None else found, reference)
        assert error <= 1e-10, name
