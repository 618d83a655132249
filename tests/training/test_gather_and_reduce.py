"""A step's gathers and reductions, on small models and by hand."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.training import gather_and_reduce as parameter_buckets
from lightning_wlb.training.gather_and_reduce import ParameterBuckets
from lightning_wlb.training.sharded_parameters import Bucket, shard_over
from tests.ranks import run_ranks
from tests.strategy.harness import relative_error, whole

WIDTH = 6


class Toy(nn.Module):
    """Two buckets and parameters of the root itself."""

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


def gathered(model: nn.Module, dtype: torch.dtype) -> ParameterBuckets:
    """Shard a model whose children are its buckets."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_over(model, mesh)
    buckets = [Bucket.of([each], [0], [each]) for each in (model, *model.children())]
    buckets = [each for each in buckets if each.parameters]
    wide = torch.promote_types(dtype, torch.float32)
    return ParameterBuckets(buckets, mesh.get_group(), None, dtype, wide)


def sharded(dtype: torch.dtype) -> tuple[Toy, ParameterBuckets]:
    model = toy(dtype)
    return model, gathered(model, dtype)


def inputs(seed: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(count)
    ]


def run(
    model: nn.Module, buckets: ParameterBuckets, batches: list[torch.Tensor], shared=()
) -> None:
    """All forwards and backwards of a step."""
    actions = [Action(0, kind, at) for at in range(len(batches)) for kind in (FORWARD, BACKWARD)]
    with buckets.step(actions, shared):
        for forward, backward in zip(actions[::2], actions[1::2], strict=True):
            with buckets.action(forward):
                loss = model(batches[forward.micro_batch])
            with buckets.action(backward):
                loss.backward()


def step(model: nn.Module, buckets: ParameterBuckets, batches: list[torch.Tensor]) -> None:
    run(model, buckets, batches)
    buckets.finish()


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


def sums(rank: int) -> list[dict[str, np.ndarray]]:
    """Three steps: both ranks work, rank 1 alone, rank 0 alone. Rank by rank other batches."""
    dtype = torch.float64
    model, buckets = sharded(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    results = []
    for counts in ((3, 2), (0, 4), (1, 0)):
        run(model, buckets, inputs(rank, counts[rank], dtype))
        # Lightning calls training_step, zero_grad, backward: what accumulated must survive, and
        # the gradients of the step before must not.
        optimizer.zero_grad()
        buckets.finish()
        results.append(gradients(model))
    return results


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
    buckets = gathered(model, torch.float64)
    held = {name: p.to_local().numel() for name, p in model.named_parameters()}
    step(model, buckets, low_inputs(rank))
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
    model, buckets = sharded(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = optimizer.param_groups[0]["params"]
    run(model, buckets, inputs(rank, 2, torch.float64))
    assert [p.grad for p in parameters] == [None] * 4, "set only by finish"
    optimizer.zero_grad()
    buckets.finish()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
    optimizer.zero_grad()
    assert [p.grad for p in parameters] == [None] * 4
    # A step in which no rank has a micro-batch: every parameter has a gradient, and it is zero.
    step(model, buckets, [])
    assert all(torch.count_nonzero(p.grad.full_tensor()) == 0 for p in parameters)


def evaluation_sees_the_optimizer_step(rank: int) -> tuple[float, float, float]:
    model, buckets = sharded(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = inputs(5, 1, torch.float64)[0]

    def evaluate() -> float:
        with torch.no_grad(), buckets.step([Action(0, FORWARD, 0)]):
            return float(model(batch))

    losses = [evaluate()]
    step(model, buckets, [batch])
    optimizer.step()
    optimizer.zero_grad()
    losses.append(evaluate())
    # Weights changed from outside, between two evaluations.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    losses.append(evaluate())
    return tuple(losses)


def accumulation(rank: int, count: int) -> list[dict[str, np.ndarray]]:
    """The same step twice."""
    model = toy(torch.float32)
    buckets = gathered(model, torch.bfloat16)
    results = []
    for _ in range(2):
        step(model, buckets, inputs(rank, count, torch.bfloat16))
        results.append(gradients(model))
    return results


def posted(rank: int) -> list[list[str]]:
    """What is posted, and when each bucket's forward and backward run, in a step each."""
    model, buckets = sharded(torch.float64)
    log: list[str] = []

    def noting(kind: str, operation):
        def post(out: torch.Tensor, mine: torch.Tensor, **options):
            log.append(f"{kind} {max(len(out), len(mine))}")
            return operation(out, mine, **options)

        return post

    before = parameter_buckets.all_gather_into, parameter_buckets.reduce_scatter_into
    parameter_buckets.all_gather_into = noting("gather", before[0])
    parameter_buckets.reduce_scatter_into = noting("reduce", before[1])
    for name in ("first", "second"):
        module = getattr(model, name)
        module.register_forward_pre_hook(lambda *_, name=name: log.append(f"forward {name}"))
        module.register_full_backward_hook(lambda *_, name=name: log.append(f"backward {name}"))
    logs = []
    for counts in ((2, 0), (1, 2)):
        # Rank by rank other counts, and inputs whose gradient is asked for.
        step(model, buckets, [each.requires_grad_() for each in batches(rank, counts)])
        logs.append(log.copy())
        log.clear()
    parameter_buckets.all_gather_into, parameter_buckets.reduce_scatter_into = before
    return logs


def batches(rank: int, counts: tuple[int, int]) -> list[torch.Tensor]:
    return inputs(rank, counts[rank], torch.float64)


def frozen_and_thawed(rank: int) -> list[list[str]]:
    """Names of the parameters with a gradient: without a weight, without any, with all."""
    model, buckets = sharded(torch.float64)
    named = []
    for frozen in (["second.weight", "first.bias"], list(dict(model.named_parameters())), []):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        batch = inputs(rank, 1, torch.float64)[0].requires_grad_()
        step(model, buckets, [batch])
        named.append([name for name, p in model.named_parameters() if p.grad is not None])
    return named


def a_failed_step(rank: int) -> float:
    """It leaves parameters sharded, and the next step has gradients of its own alone."""
    model, buckets = sharded(torch.float64)
    (batch,) = inputs(rank, 1, torch.float64)
    fails = model.second.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, buckets, [batch])
    fails.remove()
    run(model, buckets, [batch])  # whose gradients nobody takes
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    step(model, buckets, [batch])
    expected = whole_gradients(
        [*inputs(0, 1, torch.float64), *inputs(1, 1, torch.float64)], batch.dtype
    )
    return max(relative_error(g, expected[name]) for name, g in gradients(model).items())


def not_called(rank: int) -> str:
    """A forward that computes with a module's parameters and does not call it; one too early."""
    model, buckets = sharded(torch.float64)
    bypassed = nn.Sequential(model.first)
    with pytest.raises(RuntimeError, match="outside of a step"):
        model.second(torch.ones(WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match="without calling") as info:
        run(bypassed, buckets, [each.requires_grad_() for each in inputs(rank, 1, torch.float64)])
    return str(info.value)


def freed(rank: int) -> list[bool]:
    """Whether a bucket's parameters are gone when its last backward is over, by no collector."""
    model, buckets = sharded(torch.float64)
    actions = [Action(0, FORWARD, 0), Action(0, BACKWARD, 0)]
    gc.disable()
    try:
        with buckets.step(actions):
            with buckets.action(actions[0]):
                loss = model(inputs(rank, 1, torch.float64)[0])
            held = [weakref.ref(p) for p in model.parameters()]
            with buckets.action(actions[1]):
                loss.backward()
            del loss
            return [each() is None for each in held]
    finally:
        gc.enable()
        buckets.finish()


def various(rank: int) -> dict:
    life_of_gradients(rank)
    return {
        "sums": sums(rank),
        "evaluation": evaluation_sees_the_optimizer_step(rank),
        "accumulation": accumulation(rank, 64),
        "posted": posted(rank),
        "frozen": frozen_and_thawed(rank),
        "failed": a_failed_step(rank),
        "freed": freed(rank),
        "not called": not_called(rank),
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(various, 2)


def test_gradients_are_the_sum_over_ranks(results):
    for index, counts in enumerate(((3, 2), (0, 4), (1, 0))):
        batches = [b for rank, n in enumerate(counts) for b in inputs(rank, n, torch.float64)]
        expected = whole_gradients(batches, torch.float64)
        for rank in results:
            assert rank["sums"][index].keys() == expected.keys()
            for name, gradient in rank["sums"][index].items():
                assert relative_error(gradient, expected[name]) <= 1e-13, (counts, name)


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
    first, again = results[0]["accumulation"]
    for name, gradient in first.items():
        assert np.array_equal(gradient, again[name]), "a step gives the same bits again"
        assert relative_error(gradient, exact[name]) < 1e-5, name
        # What the policy avoids; if this fails, the test above shows nothing.
        assert relative_error(narrow[name].float().numpy(), exact[name]) > 1e-3, name


def test_ranks_post_the_same_whatever_they_run_and_while_they_compute(results):
    # The root's own parameters, then the two buckets: 6, 42 and 36 values.
    traffic = ["gather 6", "gather 42", "gather 36", "reduce 36", "reduce 42", "reduce 6"]
    for rank in results:
        for log in rank["posted"]:
            assert [each for each in log if each.split()[0] in ("gather", "reduce")] == traffic
    # Gathered before the first forward; reduced before the last backward has come to the end.
    assert [rank["posted"][0] for rank in results] == [
        [
            *traffic[:3],
            *["forward first", "forward second", "backward second", "backward first"],
            *["forward first", "forward second", "reduce 36", "backward second"],
            *["reduce 42", "reduce 6", "backward first"],
        ],
        traffic,
    ]


def test_frozen_parameters_are_not_reduced(results):
    every = ["scale", "first.weight", "first.bias", "second.weight"]
    for rank in results:
        assert rank["frozen"] == [["scale", "first.weight"], [], every]


def test_a_failed_step_leaves_parameters_sharded(results):
    assert max(rank["failed"] for rank in results) < 1e-13


def test_a_module_that_is_not_called_is_refused(results):
    for rank in results:
        assert "(Toy)" in rank["not called"]
        assert "Call embed, head and every layer" in rank["not called"]


def test_parameters_are_freed_behind_their_last_backward(results):
    for rank in results:
        assert rank["freed"] == [True] * 4
