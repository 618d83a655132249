"""Balanced release beyond the few micro-batches for which subsets are searched."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing.balanced import FEW
from tests.planning.test_packings import check_epoch, epoch, planner


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_long_pieces_go_together_under_the_budget(count) -> None:
    """A tenth of the documents are windows: a step has about one for each micro-batch, or none."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(4000) < 0.1, 64, rng.integers(1, 8, 4000)).tolist()
    data = DataSettings(64, count, packing="balanced", cap=128, shuffle=False)
    steps = planner(lengths, data)
    plans = epoch(steps)
    check_epoch(lengths, plans, data)
    full = [sum(piece.tokens == 64 for piece in plan.pieces) for plan in plans]
    waited = [
        plan.step - piece.arrival for plan in plans for piece in plan.pieces if piece.tokens == 64
    ]
    assert max(waited) <= data.max_age
    assert 0 < np.mean(waited) < 1.5
    assert max(full) > 1.3 * np.mean(full)
