"""Points of the attention kernel: what they take, and which of them are measured."""

from __future__ import annotations

import pytest

from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling.measured_points import GRIDS, Grid, segment_bytes, segments

BUDGET = 80 * 10**9 // 8


def test_the_bytes_of_a_segment_are_those_of_its_tensors() -> None:
    shape = ModelShape(64, 1, heads=4, kv_heads=2, head_dim=16, ffn_dim=8, vocab_size=8)
    # bfloat16: queries, outputs of two calls and two gradients of 4 x 16; the float32 gradient of
    # the queries; log-sum-exp and the backward's sums; an index for each key.
    query = 5 * 4 * 16 * 2 + 4 * 16 * 4 + 2 * 4 * 4
    key = 4 * 2 * 16 * 2 + 2 * 4 * 16 * 2 + 8  # of two heads, and their gradients of four
    assert segment_bytes(shape, 2, 3, 5) == 3 * query + 5 * key
    alone = ModelShape(64, 1, heads=4, kv_heads=4, head_dim=16, ffn_dim=8, vocab_size=8)
    assert segment_bytes(alone, 4, 0, 1) == 4 * 4 * 16 * 4 + 8


def points(grid: Grid) -> list[tuple[int, int]]:
    return [(q, round(q * ratio)) for q in grid.queries for ratio in grid.keys_per_query]


@pytest.mark.parametrize("preset", ["7b", "70b", "llama3-8b", "tiny"])
def test_no_point_takes_more_than_its_share_of_a_gpu_and_all_keep_it_busy(preset: str) -> None:
    shape, grid = TransformerConfig.preset(preset).shape, GRIDS["cuda"]
    measured = 0
    for queries, keys in points(grid):
        count = segments(grid, shape, 2, queries, keys, cuda=True, budget=BUDGET)
        assert count * segment_bytes(shape, 2, queries, keys) <= BUDGET
        if count:
            measured += 1
            tiles = count * shape.heads * -(-queries // 128)
            assert tiles >= 128 or count == 16384 // queries
    # Without the bound the 7B model's first row would have taken 256 GiB.
    whole = 128 * segment_bytes(shape, 2, 128, 512 * 128)
    assert whole > 2 * BUDGET or preset == "tiny"
    assert measured >= 0.7 * len(points(grid))
    assert all(
        segments(grid, shape, 2, queries, queries, cuda=True, budget=BUDGET)
        for queries in grid.queries
    )


def test_fewer_segments_are_measured_where_memory_ends_and_none_below_a_busy_device() -> None:
    shape, grid = TransformerConfig.preset("7b").shape, GRIDS["cuda"]
    one = segment_bytes(shape, 2, 128, 8192)
    for budget, count in ((10**12, 128), (5 * one, 5), (4 * one, 4), (4 * one - 1, 0)):
        assert segments(grid, shape, 2, 128, 8192, cuda=True, budget=budget) == count


def test_points_of_too_many_pairs_are_left_out_but_for_whole_documents() -> None:
    shape, grid = TransformerConfig.preset("tiny").shape, Grid(pairs=2**20)
    for keys, count in ((2048, 2), (4096, 0)):
        assert segments(grid, shape, 4, 2048, keys, cuda=True, budget=2**40) == 8 * (count > 0)
        assert segments(grid, shape, 4, 2048, keys, cuda=False, budget=2**40) == count // 2


@pytest.mark.parametrize("keys", [1, 128, 1024])
def test_a_cpu_gets_a_few_segments_and_no_more_pairs_than_asked_for(keys: int) -> None:
    shape, grid = TransformerConfig.preset("tiny").shape, Grid(pairs=2**20)
    count = segments(grid, shape, 4, keys, keys, cuda=False, budget=2**40)
    assert count == {1: 16, 128: 16, 1024: 1}[keys]
    assert segments(grid, shape, 4, keys, keys, cuda=False, budget=0) == 0
