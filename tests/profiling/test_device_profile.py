"""Where a quick measurement measures, and that it ends in time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling import device_profile as quick
from lightning_wlb.profiling import grid as grids
from lightning_wlb.profiling.device_profile import measure, measure_quickly
from lightning_wlb.profiling.grid import Grid, grid_for_seconds, small_grid
from lightning_wlb.profiling.measurements import Bench

TINY, BIG = TransformerConfig.preset("tiny"), TransformerConfig.preset("7b")
CPU = torch.device("cpu")


def test_there_are_points_up_to_what_there_is_time_for() -> None:
    grid = grid_for_seconds(TINY.shape, 1e11, 14.0, "cpu")
    assert grid.queries == (16, 128, 1024, 4096)
    assert grid.rows == (32, 256, 2048, 16384)
    assert grid.pairs == 4096**2
    slower = grid_for_seconds(TINY.shape, 1e9, 14.0, "cpu")
    assert slower.queries == (16, 128, 256)
    assert slower.rows == (32, 256)
    assert grid_for_seconds(BIG.shape, 6e14, 14.0, "cuda").rows == (256, 2048, 16384)
    for each in (grid, slower):
        for axis in (each.queries, each.rows):
            assert all(2 * low < high for low, high in pairwise(axis[:-1]))


def test_layers_that_are_too_large_for_the_time_are_refused() -> None:
    with pytest.raises(TimeoutError, match="layers of width 4096 would take more than 6 s here"):
        grid_for_seconds(BIG.shape, 1e11, 14.0, "cpu")


def test_it_measures_and_leaves_out_what_there_is_no_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grids, "SIZES", (128,))
    many = replace(small_grid(32, 512, 512), repeats=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_quickly(TINY, device=CPU, dtype=torch.float32, seconds=60.0)
        hurried = measure(
            TINY, name="", device=CPU, dtype=torch.float32, grid=many, links=False, until=0.0
        )
    finally:
        torch.set_num_threads(before)
    assert Profile.from_json(found.to_json()) == found
    assert found.measured
    assert found.errors == {}
    assert found.layer.rows == (32, 128)
    # The smallest point of the kernel, and two numbers of rows.
    assert many.rows == (32, 256, 512)
    assert hurried.layer.rows == (32, 256)
    assert {rate for row in hurried.attention[0].forward for rate in row} == {
        hurried.attention[0].forward[0][0]
    }
    assert 1e8 < found.layer.forward[-1] < 1e12


def test_what_other_processes_take_of_a_cpu_leaves_less_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds, clocks = [], {"monotonic": 0.0, "process_time": 0.0}

    def product(bench: Bench) -> float:
        clocks["monotonic"] += 1.0
        clocks["process_time"] += 0.25
        return 8e9

    def asked(shape: ModelShape, speed: float, seconds: float, device_type: str) -> Grid:
        speeds.append(speed)
        raise TimeoutError

    for name in clocks:
        monkeypatch.setattr(quick.time, name, lambda name=name: clocks[name])
    monkeypatch.setattr(Bench, "best_product", product)
    monkeypatch.setattr(quick, "grid_for_seconds", asked)
    with pytest.raises(TimeoutError):
        measure_quickly(TINY, device=CPU, dtype=torch.float32)
    assert speeds == [2e9]
