"""Context-parallel attention on real ranks against dense attention in one process."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.distributed.collectives import sum_dtype
from lightning_wlb.sharding import SHARDINGS, layout, rank_indices
from tests.attention.support import errors_by_keys, everything, tokens_of
from tests.device import DEVICE
from tests.ranks import run_ranks

MICRO_BATCHES = [
    [64],
    [1],  # one token: all ranks but one hold only padding
    [1, 2, 1],
    [3, 7, 5, 1, 13],  # shorter than 2·CP, odd, prime
    [97, 1, 31, 128, 2, 64, 11],
    [],
]


def check_all(rank: int) -> dict[str, float]:
    """The largest error of each sharding; by itself that under sliding windows.

    Windows are shorter than a chunk, and reach across chunks of several ranks.
    """
    group = dist.group.WORLD
    worst = {}
    for sharding in SHARDINGS:
        worst[sharding] = max(
            error
            for lengths in MICRO_BATCHES
            for error in errors_by_keys(rank, group, layout(sharding, lengths, 4, 8))
        )
        worst[f"{sharding}, window"] = max(
            error
            for lengths in MICRO_BATCHES[3:5]
            for window in (1, 6, 40)
            for error in errors_by_keys(
                rank,
                group,
                layout(sharding, lengths, 4, 1),
                options=AttentionOptions(sliding_window=window),
            )
        )
    # Long enough for cuts between tiles: by all-gather, by all-to-all, and without either.
    ways = set()
    for lengths in ([1100, 9], [900, 400, 150, 40], [128] * 8):
        made = layout("hybrid", lengths, 4, 1)
        indices = rank_indices(made, rank)
        ways.add((indices.gathered > 0, bool(indices.send_counts)))
        worst[f"hybrid, {lengths}"] = max(errors_by_keys(rank, group, made))
    assert ways == {(True, False), (False, True), (False, False)}
    return worst


def test_equals_dense_attention() -> None:
    for worst in run_ranks(check_all, 4):
        assert all(error <= 1e-12 for error in worst.values()), worst


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("lengths", MICRO_BATCHES)
def test_one_rank_equals_dense_attention(sharding: str, lengths: list[int]) -> None:
    """Without a group; padding rows exist there too, for tensor parallelism."""
    for tensor in (1, 8):
        assert max(errors_by_keys(0, None, layout(sharding, lengths, 1, tensor))) <= 1e-12


@cache
def everything_once(lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    return everything(lengths, torch.float64, heads=(2, 1))


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    "lengths",
    [(3, 1, 4, 2, 1) * 20, (640, 300, 1, 127, 129)],
    ids=["100 documents", "tiles"],
)
def test_each_of_sixteen_ranks_in_turn_equals_dense_attention(
    sharding: str, lengths: tuple[int, ...]
) -> None:
    inputs, wanted = everything_once(lengths)
    assert max(in_turn(sharding, 16, lengths, inputs, wanted)) <= 1e-12


def in_turn(
    sharding: str,
    size: int,
    lengths: tuple[int, ...],
    inputs: list[Tensor],
    wanted: list[Tensor],
    device: torch.device = DEVICE,
) -> list[float]:
    """All ranks in one process: the exchange is an index, and autograd sums over the ranks.

    It sums in at least float32, as context-parallel ranks do.

    Returns the relative errors of the output and of the gradients of q, k, v.
    """
    dtype = inputs[0].dtype
    made = layout(sharding, lengths, size, 1)
    every = [rank_indices(made, rank) for rank in range(size)]
    tokens = [tokens_of(each, lengths) for each in every]
    padded = [torch.cat((rows, rows.new_zeros(made.rows - len(rows)))) for rows in tokens]
    *leaves, gradient = (x.to(device, sum_dtype(dtype), copy=True) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out = torch.empty_like(gradient)
    attention = VarlenAttention()
    for rank, indices in enumerate(every):
        arriving = [rows[: indices.gathered] for rows in padded]
        if indices.send_counts:
            arriving = [
                rows[torch.from_numpy(each.send_index)].split(each.send_counts)[rank]
                for rows, each in zip(padded, every, strict=True)
            ]
        buffer = torch.cat((*arriving, padded[rank]))
        own = tokens[rank].to(device)
        # With one rank the keys are the local rows, and there is no index.
        keys = buffer[torch.from_numpy(indices.key_index)].to(device) if size > 1 else own
        metadata = AttentionMetadata.from_indices(indices, made.rows, size).to(device)
        read = zip(leaves, (own, keys, keys), strict=True)
        part = attention(*(leaf[index].to(dtype) for leaf, index in read), metadata)
        out = out.index_copy(0, own, part.to(out.dtype))
    got = [out, *torch.autograd.grad(out, leaves, gradient)]
    return [
        float((mine.detach().to(dtype).double().cpu() - whole).norm() / whole.norm())
        for mine, whole in zip(got, wanted, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_gpu_every_rank_in_turn_within_twice_the_error_of_one(sharding: str, size: int) -> None:
    spread = bfloat16_in_turn(sharding, size, (1300, 640, 300, 129, 128, 127, 1), 64, "cuda")
    assert max(spread) <= 2


def test_gradients_of_sixteen_ranks_in_bfloat16_are_as_good_as_one_ranks() -> None:
    """Summed in bfloat16 those of keys and values would be twice as far off."""
    assert max(bfloat16_in_turn("per_document", 16, (32,) * 8, 8, "cpu")) <= 1.5


def bfloat16_in_turn(
    sharding: str, size: int, lengths: tuple[int, ...], head_dim: int, device: str
) -> list[float]:
    """Errors to dense attention in float64, as multiples of those of one rank's kernel."""
    inputs, wanted = everything(lengths, torch.bfloat16, (8, 2), head_dim)
    alone, spread = (
        in_turn(how, ranks, lengths, inputs, wanted, torch.device(device))
        for how, ranks in (("per_document", 1), (sharding, size))
    )
    assert max(alone) <= 2e-2
    return [error / own for error, own in zip(spread, alone, strict=True)]
