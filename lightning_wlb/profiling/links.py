"""The link between two processes of one node, by messages small and large."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from lightning_wlb.cost.profile import Link
from lightning_wlb.profiling.ranks import run_ranks

SIZES = (2**12, 2**24)
"""Bytes of the small and the large message."""


def measure_link(device: torch.device, timeout_seconds: float = 60.0) -> Link:
    """Latency and bandwidth between two processes of this node, by all-gather.

    On CUDA with one device the two processes cannot have one each, and the link is unknown: then
    the memory's copy within the device is measured by the same messages.

    Args:
        device: of the kind to measure.
        timeout_seconds: for the whole measurement.
    """
    ranks = 2 if device.type == "cpu" or torch.cuda.device_count() > 1 else 1
    backend = "nccl" if device.type == "cuda" else "gloo"
    small, large = run_ranks(
        _exchange, ranks, ranks, device.type, timeout=timeout_seconds, backend=backend
    )[0]
    moved = SIZES[1] * max(ranks - 1, 1)
    return Link(
        latency_ns=float(round(small * 1e9)),
        bytes_per_second=float(round(moved / max(large - small, 1e-9))),
    )


def _exchange(rank: int, ranks: int, device_type: str) -> tuple[float, float]:
    """Seconds of an all-gather of either size, as one of the processes has them."""
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else "cpu")
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    seconds = []
    for size in SIZES:
        mine = torch.zeros(size // 4, device=device)
        everyone = torch.zeros(ranks * size // 4, device=device)
        samples = []
        for _ in range(15):
            dist.barrier()
            begin = time.perf_counter()
            gather(everyone, mine)
            if device_type == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - begin)
        seconds.append(median(samples[3:]))
    return seconds[0], seconds[1]
