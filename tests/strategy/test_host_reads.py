"""Nothing is read from the device before all of a step's gradients are on their way.

Reading waits for the device, which meanwhile is given nothing: what is queued behind it comes late.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training import gather_and_reduce as parameter_buckets
from lightning_wlb.training import parallelize as gradients
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, SMALL_TIED, data, module, trainer

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu")


def events(rank: int, mesh: tuple[int, ...], tied: bool) -> list[str]:
    """What is read and what is reduced in the second step of a run, in order."""
    seen: list[str] = []
    case = SMALL_TIED if tied else SMALL

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            # The kernel of a CPU reads its segments, that of a GPU does not. What the host makes
            # for the device is copied, for which it waits too.
            copies = function is not make or "device" in options
            if copies and not sys._getframe(1).f_code.co_filename.endswith("kernel_interface.py"):
                seen.append(name)
            return function(*args, **options)

        return call

    class Second(WLBStrategy):
        """Notes what happens from the second step's first action to its clipping."""

        def _run_step(self, batch: Any) -> Tensor:
            seen.append(f"step {batch.plan.step}")
            return super()._run_step(batch)

        def backward(self, *args: Any, **options: Any) -> Tensor:
            result = super().backward(*args, **options)
            seen.append("gradients are there")
            return result

    make = torch.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", noting("read", make))
        for name in READS:
            patch.setattr(Tensor, name, noting("read", getattr(Tensor, name)))
        patch.setattr(torch, "allclose", noting("read", torch.allclose))
        patch.setattr(
            parameter_buckets,
            "reduce_scatter_into",
            noting("reduce", parameter_buckets.reduce_scatter_into),
        )
        patch.setattr(dist, "all_reduce", noting("reduce", dist.all_reduce))
        swap = noting("reduce", dist.batch_isend_irecv)
        patch.setattr(gradients.dist, "batch_isend_irecv", swap)
        options = {"max_steps": 2, "gradient_clip_val": None}
        trainer(Second(*mesh), 2, **options).fit(module(case), data(case))
    return seen[seen.index("step 1") + 1 : len(seen) - seen[::-1].index("gradients are there") - 1]


def both(rank: int) -> list[list[str]]:
    """Tensor parallel, and a pipeline whose ends swap gradients."""
    return [events(rank, (1, 1, 1, 2), False), events(rank, (1, 2, 1, 1), True)]


def test_what_a_step_tells_is_read_behind_its_last_reduction() -> None:
    for meshes in run_ranks(both, 2, process_group=False):
        for seen in meshes:
            last = len(seen) - seen[::-1].index("reduce")
            assert "read" not in seen[:last]
            assert "read" in seen[last:]
