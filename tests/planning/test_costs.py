"""Scaled costs keep the order and fit sums of a million in 64 bits."""

from __future__ import annotations

import numpy as np

from lightning_wlb.cost.flops import ModelShape, Work
from lightning_wlb.planning.costs import PieceCosts


def test_small_costs_are_exact() -> None:
    costs = PieceCosts(lambda tokens: tokens * (tokens + 3), 100, lambda tokens: tokens)
    assert [costs.total(n) for n in (1, 7, 100)] == [4, 70, 10300]
    assert costs.forward(7) == 7
    assert costs.totals(np.array([7, 1, 7, 100])).tolist() == [70, 4, 70, 10300]
    assert PieceCosts(lambda tokens: 9 * tokens, 100).forward(2) == 6


def test_large_costs_are_scaled() -> None:
    shape = ModelShape(
        dim=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn_dim=28672, vocab_size=128_256
    )
    work = Work(shape)
    window = 1 << 20
    costs = PieceCosts(work.total, window, work.forward)
    whole = costs.total(window)
    assert whole < 1 << 41
    assert whole * (1 << 20) < 1 << 62
    for tokens in (1000, 50_000, window):
        ratio = work.total(tokens) / work.total(window)
        assert (
            costs.total(tokens) / whole == (np.float64(ratio))
            or abs(costs.total(tokens) / whole / ratio - 1) < 1e-6
        )
        assert costs.forward(tokens) / costs.total(tokens) < 0.34
    assert costs.total(1) >= 1
