"""What ranks add up in less than float32: how far gradients move, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_wlb.distributed.collectives import reduce_dtype, reducing_in
from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.tensor_parallel import shard_parameters
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training.precision import WLBPrecision
from tests.models.steps import config, documents, spread, step_batch
from tests.oracle import relative_error
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer


def errors(rank: int, context: int, tensor: int) -> dict[str, float]:
    """How far the gradients of four ranks move that add up in bfloat16."""
    mesh = init_device_mesh("cpu", (context, tensor), mesh_dim_names=("cp", "tp"))
    groups = ProcessGroups(mesh["cp"].get_group(), mesh["tp"].get_group())
    model = spread(Transformer(config()).bfloat16())
    shard_parameters(model, mesh["tp"], model.tensor_parallel_plan(tensor))
    at = Mesh(context=context, tensor=tensor).coordinate(rank)
    batch = step_batch(documents(), rank=at)

    def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
        model.zero_grad()
        with reducing_in(dtype):
            sum(model(each, groups=groups) for each in batch.micro_batches).backward()
        made = {name: each.grad.full_tensor().float() for name, each in model.named_parameters()}
        for each in made.values():
            dist.all_reduce(each, group=mesh["cp"].get_group())
        return made

    wide, narrow = gradients(torch.float32), gradients(torch.bfloat16)
    return {name: relative_error(narrow[name], wide[name]) for name in wide}


def both(rank: int) -> list[dict[str, float]]:
    return [errors(rank, *sizes) for sizes in ((4, 1), (1, 4))]


def test_bfloat16_moves_gradients_by_its_rounding() -> None:
    """Of four ranks: of two the sums round alike."""
    for meshes in run_ranks(both, 4):
        for moved in meshes:
            assert 1e-4 < max(moved.values()) < 5e-2, moved


def runs(rank: int) -> tuple[list[torch.dtype], str]:
    """What a run with ``reduce_dtype="bfloat16"`` adds up in, and what it plans with."""
    seen: list[torch.dtype] = []
    forward = Transformer.forward

    def noted(*arguments: Any, **options: Any) -> Tensor:
        seen.append(reduce_dtype(torch.bfloat16))
        return forward(*arguments, **options)

    refused = trainer(WLBStrategy(reduce_dtype="bfloat16"), 1, precision="32-true")
    with pytest.raises(MisconfigurationException, match=r"reduce_dtype='bfloat16' would round"):
        refused.fit(module(SMALL), data(SMALL))
    fitted = module(SMALL)
    runner = trainer(WLBStrategy(reduce_dtype="bfloat16"), 1, precision="bf16-mixed", max_steps=1)
    with mock.patch.object(Transformer, "forward", noted):
        runner.fit(fitted, data(SMALL))
    seen.append(reduce_dtype(torch.bfloat16))
    context = runner.strategy.planning_context(runner.datamodule)
    return seen, context.reduce_dtype


def test_the_strategy_says_so_to_its_steps_and_to_the_planner() -> None:
    ((seen, predicted),) = run_ranks(runs, 1, process_group=False)
    *inside, after = seen
    assert set(inside) == {torch.bfloat16}
    assert after == torch.float32
    assert predicted == "bfloat16"


def sums_of_a_row_wise_module(rank: int) -> list[tuple[torch.dtype, torch.dtype]]:
    """What a module of transformers that sums over ranks sends, and what it returns, by dtype."""
    from lightning_wlb.distributed import collectives
    from lightning_wlb.models.huggingface import tensor_parallel

    found = []
    for least in (torch.float32, torch.bfloat16):
        sent: list[torch.dtype] = []
        send = collectives.reduce_scatter_into

        def noting(out: Tensor, x: Tensor, send=send, sent=sent, **options) -> Any:
            sent.append(x.dtype)
            return send(out, x, **options)

        with (
            reducing_in(least),
            mock.patch.object(collectives, "reduce_scatter_into", noting),
            mock.patch.object(tensor_parallel, "_current_group", return_value=dist.group.WORLD),
        ):
            module = torch.nn.Identity()
            module.register_forward_hook(tensor_parallel._sum_over_ranks)
            out = module(torch.ones(1, 4, 3, dtype=torch.bfloat16))
        assert torch.equal(out, torch.full((1, 4, 3), 2, dtype=torch.bfloat16))
        found.append((*sent, out.dtype))
    return found


def test_sums_in_the_modules_of_transformers_travel_so_too() -> None:
    pytest.importorskip("transformers")
    half = torch.bfloat16
    assert run_ranks(sums_of_a_row_wise_module, 2) == [[(torch.float32, half), (half, half)]] * 2


def test_float32_is_the_default() -> None:
    for precision, dtype in (("bf16-true", torch.float32), ("64-true", torch.float64)):
        for given in (None, "float32"):
            strategy = WLBStrategy(reduce_dtype=given)
            strategy.precision_plugin = WLBPrecision(precision)
            assert strategy.reduce_dtype == dtype


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_dtype='float16' is not one of float32, bfloat16"):
        WLBStrategy(reduce_dtype="float16")
