"""Gradients of weights behind a block's sum: in that order, and those of plain layers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from lightning_wlb.models import tensor_parallel_overlap
from lightning_wlb.models.huggingface.late_gradients import forget_late, gather_late
from lightning_wlb.models.huggingface.tensor_parallel import present_shards
from lightning_wlb.models.tensor_parallel import gather_rows
from tests.ranks import run_ranks

ROWS, DIM = 3, 4


def made(rank: int) -> tuple[nn.ModuleList, Tensor]:
    """Linear layers of a block, one of them frozen, and this rank's rows."""
    torch.manual_seed(rank)
    layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=number > 0) for number in range(3))
    layers[2].weight.requires_grad_(False)
    present_shards(layers, {})
    return layers.double(), torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)


def gradients(layers: nn.ModuleList, x: Tensor, late: bool, again: bool) -> list[Tensor]:
    """Of rows and weights; the first layer is used twice, as where a family shares it."""

    def block(x: Tensor) -> Tensor:
        every = (
            gather_late(x, dist.group.WORLD, layers) if late else gather_rows(x, dist.group.WORLD)
        )
        first, second, third = layers
        return third(second(first(every[None]).tanh()) + first(every[None] ** 2))

    forget_late(layers)
    out = checkpoint(block, x, use_reentrant=False) if again else block(x)
    out.backward(torch.ones_like(out) + out.detach())
    found = [each.grad for each in (x, *layers.parameters()) if each.grad is not None]
    for each in (x, *layers.parameters()):
        each.grad = None
    return found


def compared(rank: int) -> list[float]:
    layers, x = made(rank)
    worst = []
    for again in (False, True):
        plain, late, twice = (gradients(layers, x, each, again) for each in (False, True, True))
        assert len(plain) == len(late) == 1 + 4  # two weights and two biases
        for one, two, other in zip(late, twice, plain, strict=True):
            assert torch.equal(one, two), "the same bits on repetition"
            worst.append(((one - other).norm() / other.norm()).item())
    return worst


def test_gradients_are_those_of_plain_layers() -> None:
    assert max(max(each) for each in run_ranks(compared, 2)) <= 1e-14


class Products(TorchDispatchMode):
    """Notes products of matrices."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.log.append("product")
        return func(*args, **(kwargs or {}))


def order(rank: int) -> list[str]:
    layers, x = made(rank)
    log: list[str] = []
    post = tensor_parallel_overlap.reduce_scatter_into

    def posting(*args: Any, **options: Any) -> Any:
        log.append("sum")
        work = post(*args, **options)
        return mock.Mock(wait=lambda: (log.append("there"), work.wait()))

    every = gather_late(x, dist.group.WORLD, layers)
    out = layers[1](layers[0](every))
    with mock.patch.object(tensor_parallel_overlap, "reduce_scatter_into", posting), Products(log):
        out.sum().backward()
    return log


def test_weights_wait_for_the_sum_to_be_posted_and_it_for_them() -> None:
    for log in run_ranks(order, 2):
        assert log == ["product", "product", "sum", "product", "product", "there"]
