"""Measurements that there is no memory for, held-out micro-batches, and what a pass counts as."""

from __future__ import annotations

from collections.abc import Sequence

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


def runs_out_beyond(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every kernel take a second for each call, and run out of memory beyond so many keys."""

    def seconds(bench: DeviceBench, segments: Sequence[tuple[int, int]]) -> np.ndarray:
        if segments[0][1] > keys:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return np.array((1.0, 1.0))

    monkeypatch.setattr(DeviceBench, "_kernel_seconds", seconds)
    monkeypatch.setattr(DeviceBench, "_call_overhead", lambda bench: np.zeros(2))


def test_a_point_without_memory_has_the_better_rate_of_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs_out_beyond(8, monkeypatch)
    found = made()
    table = found.attention()

    def rate(queries: int, keys: int, segments: int) -> float:
        flops = 4 * CONFIG.heads * CONFIG.shape.head_dim * causal_pairs(queries, keys - queries)
        return float(f"{flops * segments:.4g}")

    # Calls of at most 64 pairs: 4 segments of 4 x 4, 2 of 4 x 8, one of 8 x 8.
    first, second, third = rate(4, 4, 4), rate(4, 8, 2), rate(8, 8, 1)
    assert first < second > third
    assert table.forward == ((first, second, second), *[(third, second, second)] * 2)
    assert table.backward == pytest.approx(2.5 * np.array(table.forward), rel=1e-3)
    # 4 x 16 and 16 x 16; all others were not tried, because they are of more than 64 pairs.
    assert found.out_of_memory == 2


def test_a_device_without_memory_for_the_smallest_point_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs_out_beyond(2, monkeypatch)
    with pytest.raises(ValueError, match=r"attention over 4 queries of 4 heads of 8.*Free memory"):
        made().attention()


def test_the_profile_says_once_what_was_not_measured_and_predicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs_out_beyond(8, monkeypatch)
    # As with one GPU.
    monkeypatch.setattr("lightning_wlb.profiling.device_profile.measure_link", lambda device: None)
    told: list[str] = []
    profile = measure(
        CONFIG, name="p", device=CPU, dtype=torch.float32, grid=GRID, report=told.append
    )
    sentence = "Out of memory at 2 measurements"
    assert [sentence in each for each in (*told, *profile.sources)].count(True) == 2
    assert any("not measured, the memory's bandwidth" in each for each in profile.sources)
    assert profile.links["node"].bytes_per_second == profile.element_bytes_per_second
    assert profile.errors["micro_batches"] == 4


def test_rows_end_where_layers_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceBench._stage_seconds

    def seconds(bench: DeviceBench, model: torch.nn.Module, lengths: Sequence[int]) -> np.ndarray:
        if sum(lengths) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(bench, model, lengths)

    monkeypatch.setattr(DeviceBench, "_stage_seconds", seconds)
    found = made()
    stages = found.stages()
    assert found.rows == (16, 32)
    assert stages.layer.shape == (2, 2)
    layer, head = found.tables(stages, found.element_bytes_per_second(stages))
    assert layer.rows == head.rows == (16, 32)


def test_rows_that_cannot_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [made()._stage_bytes(rows) for rows in GRID.rows]
    monkeypatch.setattr(bench, "free_bytes", lambda device: 4 * needed[1] // 3 + 4)
    assert made().rows == (16, 32)
    monkeypatch.setattr(bench, "free_bytes", lambda device: needed[0])
    with pytest.raises(ValueError, match="three layers of dim 32 and feed-forward 64 with 16 rows"):
        made()
