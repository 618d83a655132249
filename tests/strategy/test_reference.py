"""Promise 1, first half: ``strategy="auto"`` equals the oracle, and may then stand in for it."""

import numpy as np
import pytest
import torch

from lightning_wlb.plan import StepPlan
from tests.device import DEVICE
from tests.oracle import count_targets, oracle
from tests.strategy.harness import CASES, LENGTHS, documents, module, relative_error
from tests.strategy.test_gradients import TOLERANCE, expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_equals_dense_attention_of_raw_documents(case):
    record = expected(case)
    store = documents(case.masked)
    raw = [store.read(number, 0, length).tolist() for number, length in enumerate(LENGTHS)]
    masks = None
    if case.masked:
        masks = [store.mask(number, 0, length).tolist() for number, length in enumerate(LENGTHS)]
    plan = StepPlan.from_json(record["plans"][0])
    pieces = [(piece.document, piece.origin, piece.stop) for piece in plan.pieces]

    fresh = module(case)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        fresh.configure_model()
    finally:
        torch.set_default_dtype(before)
    total, gradients = oracle(fresh.model.to(DEVICE), raw, pieces, masks)
    targets = count_targets(raw, pieces, masks)
    assert targets == plan.target_tokens
    assert record["losses"][0] == pytest.approx(total / targets, rel=1e-12)
    first = record["gradients"][0]
    assert {name.removeprefix("model.") for name in first} == set(gradients)
    for name, gradient in gradients.items():
        want = (gradient / targets).cpu().numpy().astype(np.float64)
        assert relative_error(first[f"model.{name}"], want) <= TOLERANCE, name
