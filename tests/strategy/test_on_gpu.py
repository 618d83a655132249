"""Whole runs on one CUDA device against the same on a CPU: steps, checkpoints, two NCCL ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import (
    SMALL,
    Recorder,
    SharedGPUs,
    data,
    module,
    relative_error,
    trainer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = "gpu"
COLLECTIVES = {"gpu": "nccl", "cpu": "gloo"}
TOLERANCE = 1e-10
SECONDS = 40  # of a run; most of it is the start of CUDA and NCCL


def run_steps(
    rank: int,
    accelerator: str,
    mesh: tuple[int, ...] = (1, 1, 1, 1),
    steps: int = 3,
    backend: str = "exact",
    precision: str = "64-true",
    saved: str | None = None,
    resumed: str | None = None,
) -> dict[str, Any]:
    """Train on a mesh of devices of a kind; what happened, and how the optimizer was made."""
    # NCCL knows hosts by the first of these, and refuses two ranks on one device of one host. Told
    # to be on two hosts they talk through the loopback.
    os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    recorder = Recorder()
    runner = trainer(
        WLBStrategy(*mesh, process_group_backend=COLLECTIVES[accelerator]),
        int(np.prod(mesh)),
        accelerator=SharedGPUs() if accelerator == GPU else accelerator,
        precision=precision,
        max_steps=steps,
        callbacks=[recorder],
    )
    runner.fit(module(SMALL, attention_backend=backend), data(SMALL), ckpt_path=resumed)
    if saved is not None:
        runner.save_checkpoint(saved)
    return recorder.record() | {
        "fused": runner.optimizers[0].defaults["fused"],
        "pinned": runner.train_dataloader.pin_memory,
    }


def ran(accelerator: str, ranks: int = 1, **options: Any) -> list[dict[str, Any]]:
    """:func:`run_steps` on so many ranks."""
    function = partial(run_steps, accelerator=accelerator, **options)
    return run_ranks(function, ranks, process_group=False, timeout=SECONDS)


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    return ran("cpu")[0]


def worst(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The largest relative error of the arrays that were found."""
    return max(relative_error(value, wanted[name]) for name, value in found.items())


def test_three_steps_are_those_of_a_cpu(
    on_cpu: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    """In float64 with the kernel ``exact``: executor, pinned batches, clipping, fused AdamW."""
    (found,) = ran(GPU)
    assert found["plans"] == on_cpu["plans"]
    assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-12)
    steps = zip(found["gradients"], on_cpu["gradients"], strict=True)
    errors = [worst(mine, theirs) for mine, theirs in steps]
    errors.append(worst(found["parameters"], on_cpu["parameters"]))
    record_property("errors", errors)
    assert max(errors) <= TOLERANCE
    assert (found["fused"], on_cpu["fused"]) == (True, None)
    assert (found["pinned"], on_cpu["pinned"]) == (True, False)


def test_bf16_mixed_with_the_kernel_of_auto_is_near_float64(
    on_cpu: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    (found,) = ran(GPU, backend="auto", precision="bf16-mixed")
    losses = np.array(found["losses"]) / np.array(on_cpu["losses"]) - 1
    error = worst(found["gradients"][0], on_cpu["gradients"][0])
    record_property("losses", losses.tolist())
    record_property("gradients", error)
    assert np.abs(losses).max() <= 2e-3
    assert error <= 5e-2


def test_a_checkpoint_of_the_gpu_is_resumed_by_two_cpu_ranks(
    on_cpu: dict[str, Any], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path = str(tmp_path / "saved.ckpt")
    ran(GPU, steps=2, saved=path)
    for found in ran("cpu", 2, mesh=(1, 2, 1, 1), resumed=path):
        assert found["losses"] == pytest.approx(on_cpu["losses"][2:], rel=1e-12)
        error = worst(found["parameters"], on_cpu["parameters"])
        record_property("error", error)
        assert error <= TOLERANCE


@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)], ids=str)
def test_two_ranks_over_nccl_are_one_on_a_cpu(
    mesh: tuple[int, ...],
    on_cpu: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    for found in ran(GPU, 2, mesh=mesh):
        assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-12)
        error = worst(found["parameters"], on_cpu["parameters"])
        record_property("error", error)
        assert error <= TOLERANCE
