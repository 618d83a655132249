"""Attention split by heads on real ranks against dense attention in one process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.ulysses import head_parallel_attention
from lightning_wlb.sharding import HEADS, check_heads, head_indices, layout, rank_indices
from tests.attention.support import HALF, errors_by_keys, rank_errors
from tests.ranks import run_ranks

MICRO_BATCHES: list[list[int]] = [[64], [1], [1, 2, 1], [3, 7, 5, 1, 13], [97, 1, 31, 128, 2], []]


def check_micro_batch(
    rank: int,
    lengths: list[int],
    heads: tuple[int, int],
    tensor_parallel_size: int = 1,
    dtype: torch.dtype = torch.float64,
    options: AttentionOptions = PLAIN,
) -> list[float]:
    """This rank's part of the relative errors of the output and of the gradients of q, k, v."""
    made = layout(HEADS, lengths, dist.get_world_size(), tensor_parallel_size)

    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        metadata, attention, of_layer = others
        return head_parallel_attention(q, k, v, metadata, attention, dist.group.WORLD, of_layer)

    # Every rank computes some heads of every token.
    kernels = int(sum(lengths) > 0)
    return rank_errors(attend, made, head_indices(made, rank), kernels, heads, dtype, options)


def check_all(rank: int, every: list[tuple[int, int]]) -> float:
    return max(
        error
        for heads in every
        for lengths in MICRO_BATCHES
        for tensor in (1, 8)
        for error in check_micro_batch(rank, lengths, heads, tensor)
    )


@pytest.mark.parametrize(
    ("size", "every"),
    [(2, [(4, 2), (6, 1)]), (4, [(8, 4), (4, 2)])],  # key heads: as many as ranks, fewer
)
def test_equals_dense_attention(size: int, every: list[tuple[int, int]]) -> None:
    assert max(run_ranks(check_all, size, every)) <= 1e-12


def check_others(rank: int) -> tuple[float, list[float]]:
    window = check_micro_batch(
        rank, [40, 7, 64], (4, 2), options=AttentionOptions(sliding_window=9)
    )
    half = check_micro_batch(rank, HALF, (4, 2), 8, torch.bfloat16)
    return max(window), half


def test_sliding_window_and_bfloat16() -> None:
    windows, halves = zip(*run_ranks(check_others, 2), strict=True)
    assert max(windows) <= 1e-12
    alone = errors_by_keys(0, None, layout("hybrid", HALF, 1, 8), torch.bfloat16)
    for errors, own in zip(zip(*halves, strict=True), alone, strict=True):
        assert math.hypot(*errors) <= 2 * own


def shared_head(rank: int) -> float:
    """Every rank's query head reads the one key head: shares of 256, 1 and 1 make 258."""
    metadata = AttentionMetadata.from_indices(
        head_indices(layout(HEADS, [1, 1, 1], 3, 1), rank), 1, 3
    )
    q = torch.zeros(1, 3, 1, dtype=torch.bfloat16)
    v = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = head_parallel_attention(q, v, v, metadata, VarlenAttention("cpu"), dist.group.WORLD)
    gradient = torch.tensor([256.0, 1.0, 1.0]).reshape(1, 3, 1).bfloat16()
    (found,) = torch.autograd.grad(out, v, gradient)
    return float(found)


def test_gradients_of_shared_key_heads_are_summed_in_float32() -> None:
    assert run_ranks(shared_head, 3) == [258] * 3


def mismatch(rank: int) -> None:
    attention, group = VarlenAttention("cpu"), dist.group.WORLD

    def call(size: int, heads: int) -> Any:
        made = layout(HEADS, [8], size, 1)
        metadata = AttentionMetadata.from_indices(head_indices(made, 0), made.rows, size)
        q = torch.zeros(4, heads, 2)
        return head_parallel_attention(q, q, q, metadata, attention, group)

    with pytest.raises(ValueError, match=r"2 rank\(s\) and q 4 rows.*for 4 ranks and 2 rows"):
        call(4, 4)
    with pytest.raises(ValueError, match=r"splits the 3 query and 3 key/value heads.*over 2"):
        call(2, 3)


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(mismatch, 2)
    check_heads(32, 8, 16)
    check_heads(32, 8, 4, 8)
    for sizes in ((32, 8, 64), (32, 8, 8, 8), (12, 4, 6)):
        with pytest.raises(ValueError, match="they do not divide"):
            check_heads(*sizes)
    with pytest.raises(ValueError, match="head_indices is for a rank of a layout by heads"):
        head_indices(layout("hybrid", [8], 2, 1), 0)


def test_one_rank_has_nothing_to_split() -> None:
    made = layout(HEADS, [5, 3], 1, 1)
    assert not made.by_heads
    assert rank_indices(made, 0).cu_seqlens_k.tolist() == [0, 5, 8]
