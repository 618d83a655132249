"""The link between two processes, and none where there are no two devices."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.cost.profile import Link
from lightning_wlb.profiling import links, ranks
from lightning_wlb.profiling.links import measure_link

CUDA = torch.device("cuda", 0)


def test_one_gpu_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert measure_link(CUDA) is None


def test_two_gpus_are_measured_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def run_ranks(*args: Any, **options: Any) -> list[tuple[float, float]]:
        calls.append((args[1:], options["backend"]))
        return [(1e-5, 1e-5 + 2**24 / 1e11)]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(links, "run_ranks", run_ranks)
    assert measure_link(CUDA) == Link(latency_ns=10000.0, bytes_per_second=1e11)
    assert calls == [((2, "cuda"), "nccl")]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_of_nccl_takes_its_own_gpu_before_its_process_group(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what is set below is undone
    calls: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: calls.append((backend, options["device_id"])),
    )
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    ours, theirs = ranks._context.Pipe(duplex=False)
    ranks._rank(theirs, rank_itself, 1, 2, 0, backend, 1.0, ())
    assert pickle.loads(ours.recv_bytes()) == (True, 1)
    own = torch.device("cuda", 1)
    assert calls == ([own, ("nccl", own)] if backend == "nccl" else [("gloo", None)])


def rank_itself(rank: int) -> int:
    return rank
