"""What a model of one's own may do in a step; what would give wrong gradients is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_wlb.models.tensor_parallel import local
from lightning_wlb.training import gather_and_reduce as parameter_buckets
from tests.ranks import run_ranks
from tests.training.test_gather_and_reduce import WIDTH, gathered, inputs, run, step, toy


class Twice(nn.Module):
    """Uses a layer twice, the second time inside of a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.first, torch.tanh(self.first(x)), use_reentrant=True).sum()


def late(rank: int) -> str:
    model = Twice()
    split = gathered(model, torch.float64)
    with pytest.raises(RuntimeError, match="use_reentrant=True") as info:
        run(model, split, [each.requires_grad_() for each in inputs(rank, 1, torch.float64)])
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return str(info.value)


def own_hook(rank: int) -> tuple[int, int]:
    """Rows of a weight that a module's hook sees, made before the model was split, and at rest."""
    model, rows = toy(torch.float64), []
    model.first.register_forward_pre_hook(lambda module, _: rows.append(local(module.weight)))
    split = gathered(model, torch.float64)
    step(model, split, inputs(rank, 1, torch.float64))
    return len(rows[0]), len(model.first.weight.to_local())


def hooked(rank: int) -> str:
    model = toy(torch.float64)
    split = gathered(model, torch.float64)
    model.second.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="would never run") as info:
        run(model, split, inputs(rank, 1, torch.float64))
    return str(info.value)


def behind_shared(rank: int) -> list[list[str]]:
    """When reductions are posted where other replicas share the last micro-batch, or the first."""
    model, log = toy(torch.float64), []
    split = gathered(model, torch.float64)
    model.first.register_full_backward_hook(lambda *_: log.append("backward"))
    logs = []
    with pytest.MonkeyPatch.context() as patch:
        reduce_scatter = parameter_buckets.reduce_scatter_into

        def noting(*args, **options):
            log.append("reduce")
            return reduce_scatter(*args, **options)

        patch.setattr(parameter_buckets, "reduce_scatter_into", noting)
        for shared in ({1}, {0}):
            batches = [each.requires_grad_() for each in inputs(rank, 2, torch.float64)]
            run(model, split, batches, shared)
            split.finish()
            logs.append(log.copy())
            log.clear()
    return logs


def various(rank: int) -> dict:
    return {
        "late": late(rank),
        "hook": own_hook(rank),
        "hooked": hooked(rank),
        "shared": behind_shared(rank),
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(various, 2)


def test_a_gradient_behind_the_last_one_is_refused_not_lost(results):
    for rank in results:
        assert rank["late"].startswith("Linear runs, or gets a gradient, after")


def test_parameters_are_there_before_a_modules_own_hooks(results):
    assert [rank["hook"] for rank in results] == [(WIDTH, WIDTH // 2)] * 2


def test_a_hook_on_a_parameter_is_refused(results):
    for rank in results:
        assert rank["hooked"].startswith("weight has a hook")


def test_nothing_is_reduced_before_a_shared_micro_batch_is_over(results):
    reduced = ["reduce"] * 3  # the two buckets, and the model's own parameter
    for rank in results:
        assert rank["shared"] == [
            ["backward", "backward", *reduced],
            ["backward", *reduced, "backward"],
        ]
