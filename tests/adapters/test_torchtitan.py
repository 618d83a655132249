"""Rows for torchtitan: every token once as input and once as target, balanced, resumable."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_wlb.adapters.torchtitan import BalancedRows

GENERATOR = np.random.default_rng(2)
DOCUMENTS = [GENERATOR.integers(1, 9, size).tolist() for size in GENERATOR.integers(2, 120, 40)]
GIVEN = {"seq_len": 512, "documents_per_step": 20, "accumulation_steps": 2, "model": "tiny"}


def test_rows_hold_whole_documents() -> None:
    ranks = [list(islice(BalancedRows(DOCUMENTS, rank, 2, **GIVEN), 4)) for rank in range(2)]
    pairs = 0
    for inputs, labels in (row for rank in ranks for row in rank):
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (512,)
        target = labels != -100
        pairs += int(target.sum())
        inside = target[:-1] & (inputs["positions"][1:] > 0) & target[1:]
        assert torch.equal(labels[:-1][inside], inputs["input"][1:][inside])
    assert pairs == sum(len(document) - 1 for document in DOCUMENTS)


def test_several_workers_would_repeat_rows() -> None:
    rows = BalancedRows(DOCUMENTS, 0, 2, **GIVEN)
    with pytest.raises(ValueError, match="2 workers would each yield every row"):
        next(iter(DataLoader(rows, num_workers=2)))


def test_torchtitans_loader_resumes_it() -> None:
    module = pytest.importorskip(
        "torchtitan.components.dataloader", reason="torchtitan", exc_type=ImportError
    )

    def loader():
        return module.ParallelAwareDataloader(
            BalancedRows(DOCUMENTS, 1, 2, **GIVEN), 1, 2, batch_size=1
        )

    expected = [labels for _, labels in islice(loader(), 9)]
    first = loader()
    source = iter(first)
    for _ in range(3):
        next(source)
    again = loader()
    again.load_state_dict(first.state_dict())
    for (_, labels), wanted in zip(again, expected[3:], strict=False):
        assert torch.equal(labels, wanted)
