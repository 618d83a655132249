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
        _exchange, ranks, device.type, timeout=timeout_seconds, backend=backend
    )[0]
    return _link(small, large, ranks)


def link_of_ranks(device: torch.device) -> Link:
    """Latency and bandwidth between the ranks of the default process group, by all-gather.

    Collective over all of them; they are on one node. Each may measure a little differently.
    """
    return _link(*_seconds(device), dist.get_world_size())


def _link(small: float, large: float, ranks: int) -> Link:
    """From the seconds of both sizes of message between so many ranks."""
    return Link(
        latency_ns=float(round(small * 1e9)),
        bytes_per_second=float(round(SIZES[1] * max(ranks - 1, 1) / max(large - small, 1e-9))),
    )


def _exchange(rank: int, device_type: str) -> tuple[float, float]:
    return _seconds(torch.device(f"cuda:{rank}" if device_type == "cuda" else "cpu"))


def _seconds(device: torch.device) -> tuple[float, float]:
    """Seconds of an all-gather of either size, as one of the processes has them."""
    ranks = dist.get_world_size()
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
            if device.type == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - begin)
        seconds.append(median(samples[3:]))
    return seconds[0], seconds[1]
