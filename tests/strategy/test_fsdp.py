"""Pins the private parts of FSDP2 that finish_step and begin_step go through."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_wlb.strategy import fsdp
from tests.ranks import run_ranks
from tests.strategy.harness import relative_error, whole

WIDTH = 6


class Toy(nn.Module):
    """Two units and parameters of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(x))) * self.scale).square().sum()


def toy(dtype: torch.dtype) -> Toy:
    torch.manual_seed(3)
    return Toy().to(dtype)


def sharded(dtype: torch.dtype, policy: MixedPrecisionPolicy | None = None) -> Toy:
    model = toy(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [model.first, model.second]
    fsdp.shard(model, units, mesh, policy or MixedPrecisionPolicy())
    return model


def inputs(seed: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(count)
    ]


def step(model: nn.Module, batches: list[torch.Tensor]) -> None:
    fsdp.begin_step(model)
    for batch in batches:
        model(batch).backward()
    fsdp.finish_step(model)


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: whole(p.grad.float() if p.grad.dtype == torch.bfloat16 else p.grad)
        for name, p in model.named_parameters()
    }


def whole_gradients(batches: list[torch.Tensor], dtype: torch.dtype) -> dict[str, np.ndarray]:
    model = toy(dtype)
    for batch in batches:
        model(batch).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def sums(rank: int, dtype: torch.dtype) -> list[dict[str, np.ndarray]]:
    """Three steps: both ranks work, rank 1 alone, rank 0 alone. Rank by rank other batches."""
    model = sharded(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    results = []
    for counts in ((3, 2), (0, 4), (1, 0)):
        batches = inputs(rank, counts[rank], dtype)
        fsdp.begin_step(model)
        for batch in batches:
            model(batch).backward()
        # Lightning calls training_step, zero_grad, backward: what accumulated must survive, and
        # the gradients of the step before must not.
        optimizer.zero_grad()
        fsdp.finish_step(model)
        results.append(gradients(model))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_the_sum_over_ranks_on_every_module(dtype):
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    ranks = run_ranks(sums, 2, dtype)
    for index, counts in enumerate(((3, 2), (0, 4), (1, 0))):
        batches = [b for rank, count in enumerate(counts) for b in inputs(rank, count, dtype)]
        expected = whole_gradients(batches, dtype)
        for results in ranks:
            assert set(results[index]) == {"first.weight", "first.bias", "second.weight", "scale"}
            for name, gradient in results[index].items():
                error = relative_error(gradient, expected[name])
                assert error <= tolerance, (counts, name, error)


class Low(nn.Module):
    """A matrix and a packed one with fewer rows than ranks, and one that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"low": (2, 8), "packed": (2, 4, 3), "odd": (3, 5)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.low @ x).sum() + torch.tanh(self.packed * x[0]).sum()
        return hidden + torch.tanh(self.odd * x[1]).sum()


def low_inputs(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(rank)]


def few_rows(rank: int) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    model = Low()
    fsdp.shard(model, [], init_device_mesh("cpu", (4,)), MixedPrecisionPolicy())
    held = {name: p.to_local().numel() for name, p in model.named_parameters()}
    step(model, low_inputs(rank))
    return held, gradients(model)


def test_parameters_of_few_rows_are_sharded_over_all_ranks():
    model = Low()
    for rank in range(4):
        for x in low_inputs(rank):
            model(x).backward()
    ranks = run_ranks(few_rows, 4)
    assert [held["low"] for held, _ in ranks] == [4, 4, 4, 4]
    assert [held["packed"] for held, _ in ranks] == [6, 6, 6, 6]
    assert [held["odd"] for held, _ in ranks] == [5, 5, 5, 0]
    for _, found in ranks:
        for name, parameter in model.named_parameters():
            assert relative_error(found[name], parameter.grad.numpy()) < 1e-13


def life_of_gradients(rank: int) -> None:
    model = sharded(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = optimizer.param_groups[0]["params"]
    fsdp.begin_step(model)
    for batch in inputs(rank, 2, torch.float64):
        model(batch).backward()
    assert [p.grad for p in parameters] == [None] * 4, "set only by finish_step"
    optimizer.zero_grad()
    fsdp.finish_step(model)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
    optimizer.zero_grad()
    assert [p.grad for p in parameters] == [None] * 4
    # A step in which no rank has a micro-batch: every parameter has a gradient, and it is zero.
    step(model, [])
    assert all(torch.count_nonzero(p.grad.full_tensor()) == 0 for p in parameters)


def evaluation_sees_the_optimizer_step(rank: int) -> tuple[float, float, float]:
    model = sharded(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = inputs(5, 1, torch.float64)[0]

    def evaluate() -> float:
        with torch.no_grad():
            fsdp.begin_step(model)
            loss = float(model(batch))
            fsdp.reshard(model)
        return loss

    losses = [evaluate()]
    step(model, [batch])
    optimizer.step()
    optimizer.zero_grad()
    losses.append(evaluate())
    # Weights changed from outside, between two evaluations.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    losses.append(evaluate())
    return tuple(losses)


def accumulation(rank: int, count: int) -> dict[str, np.ndarray]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(torch.float32, policy)
    step(model, inputs(rank, count, torch.bfloat16))
    return gradients(model)


def various(rank: int) -> dict:
    life_of_gradients(rank)
    return {
        "evaluation": evaluation_sees_the_optimizer_step(rank),
        "accumulation": accumulation(rank, 64),
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(various, 2)


def test_an_evaluation_sees_the_weights_of_the_last_optimizer_step(results):
    model = toy(torch.float64)
    batch = inputs(5, 1, torch.float64)[0]
    expected = [float(model(batch).detach())]
    (2 * model(batch)).backward()  # both ranks train on the same batch
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
        expected.append(float(model(batch)))
        for parameter in model.parameters():
            parameter *= 2
        expected.append(float(model(batch)))
    for rank in results:
        assert rank["evaluation"] == pytest.approx(expected, rel=1e-12)


def test_many_bfloat16_micro_batches_accumulate_in_float32(results):
    model = toy(torch.float32).bfloat16()
    batches = [b for rank in range(2) for b in inputs(rank, 64, torch.bfloat16)]
    exact = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
    narrow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        model.zero_grad()
        model(batch).backward()
        for name, p in model.named_parameters():
            exact[name] += p.grad.double().numpy()
            narrow[name] += p.grad
    for name, gradient in results[0]["accumulation"].items():
        assert relative_error(gradient, exact[name]) < 1e-5, name
        # What the policy avoids; if this fails, the test above shows nothing.
        assert relative_error(narrow[name].float().numpy(), exact[name]) > 1e-3, name
