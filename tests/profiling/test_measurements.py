"""Measurements that there is no memory for, held-out micro-batches, and what a pass counts as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_wlb.cost.flops import causal_pairs
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling import measurements as bench
from lightning_wlb.profiling.device_profile import measure
from lightning_wlb.profiling.measured_points import Grid
from lightning_wlb.profiling.measurements import DeviceBench

CPU = torch.device("cpu")
CONFIG = TransformerConfig.preset("tiny", dim=32, ffn_dim=64, vocab_size=32)
GRID = Grid(
    queries=(4, 8, 16), keys_per_query=(1.0, 2.0, 4.0), pairs=64, rows=(16, 32, 64), repeats=1,
    held_out=4,
)  # fmt: skip


def made(grid: Grid = GRID) -> DeviceBench:
    return DeviceBench(CONFIG, CPU, torch.float32, grid)


def test_a_point_that_is_left_out_has_the_better_rate_of_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceBench, "_kernel_seconds", lambda bench, segments: np.ones(2))
    monkeypatch.setattr(DeviceBench, "_call_overhead", lambda bench: np.zeros(2))
    table = made().attention()

    def rate(queries: int, keys: int, segments: int) -> float:
        flops = 4 * CONFIG.heads * CONFIG.shape.head_dim * causal_pairs(queries, keys - queries)
        return float(f"{flops * segments:.4g}")

    # Calls of at most 64 pairs: 4 segments of 4 x 4, 2 of 4 x 8, one of 4 x 16, 8 x 8 and 16 x 16.
    first, second, third = rate(4, 4, 4), rate(4, 8, 2), rate(4, 16, 1)
    fourth, fifth = rate(8, 8, 1), rate(16, 16, 1)
    assert fourth < second < fifth
    assert table.forward == (
        (first, second, third), (fourth, second, third), (fifth, fifth, fifth),
    )  # fmt: skip
    assert table.backward == pytest.approx(2.5 * np.array(table.forward), rel=1e-3)


def test_without_a_second_gpu_the_bandwidth_stands_for_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_wlb.profiling.device_profile.measure_link", lambda device: None)
    profile = measure(CONFIG, name="p", device=CPU, dtype=torch.float32, grid=GRID)
    assert any("not measured, the memory's bandwidth" in each for each in profile.sources)
    assert profile.links["node"].bytes_per_second == profile.element_bytes_per_second
    assert profile.errors["micro_batches"] == 4


def test_rows_that_cannot_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [made()._stage_bytes(rows) for rows in GRID.rows]
    monkeypatch.setattr(bench, "free_bytes", lambda device: 4 * needed[1] // 3 + 4)
    assert made().rows == (16, 32)
    monkeypatch.setattr(bench, "free_bytes", lambda device: needed[0])
    with pytest.raises(ValueError, match="three layers of dim 32 and feed-forward 64 with 16 rows"):
        made()
