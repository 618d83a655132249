"""Which part of a parameter a rank holds, and how it gets its values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from lightning_wlb.models.initialise import assign, held, share_of
from lightning_wlb.models.tensor_parallel import shard_parameters
from tests.ranks import run_ranks

# Both axes on one dim, on two; fewer rows than ranks, and rows that do not divide.
CASES = (
    ((8, 6), Shard(0)),
    ((2, 4), Shard(0)),
    ((5, 4), Shard(1)),
    ((4, 6, 2), Shard(1)),
    ((3,), Replicate()),
    ((1, 4), Replicate()),
)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def on_mesh(rank: int, data: int, tensor: int) -> list[list[float]]:
    """Parameters that are split without memory, then filled: what the rank holds of each."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    parts = []
    for shape, placement in CASES:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape, device="meta"))
        shard_parameters(module, mesh["tensor"], {"weight": placement})
        fully_shard(module, mesh=mesh["data"])
        parameter = nn.Parameter(torch.empty_like(module.weight.detach(), device="cpu"))
        assign(parameter, numbered(shape))
        assert torch.equal(held(parameter), numbered(shape)[share_of(parameter)])
        assert torch.equal(parameter.detach().full_tensor(), numbered(shape))
        parts.append(held(parameter).flatten().tolist())
    return parts


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 1)])
def test_shares_of_both_axes_make_up_the_whole_parameter(data, tensor):
    ranks = run_ranks(on_mesh, data * tensor, data, tensor)
    for number, (shape, placement) in enumerate(CASES):
        copies = tensor if placement == Replicate() else 1
        got = sorted(value for parts in ranks for value in parts[number])
        assert got == sorted(numbered(shape).flatten().tolist() * copies)


def test_a_plain_parameter_is_held_whole():
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert share_of(parameter) == (slice(0, 2), slice(0, 3))
    assign(parameter, numbered((2, 3)))
    assert parameter.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
