"""The link between two processes of one node, by messages small and large."""

from __future__ import annotations

import datetime
import socket
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_wlb.cost.profile import Link


def measure_link(device: torch.device, timeout_seconds: float = 60.0) -> Link:
    """Latency and bandwidth between two processes of this node, by all-gather.

    On CUDA with one device the two processes cannot have one each, and the link is unknown: then
    the memory's copy within the device is measured by the same messages.

    Args:
        device: of the kind to measure.
        timeout_seconds: for each collective.
    """
    ranks = 2 if device.type == "cpu" or torch.cuda.device_count() > 1 else 1
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(
        _exchange, (ranks, port, device.type, timeout_seconds, results), ranks
    )
    small, large, size = results.get()
    moved = size * max(ranks - 1, 1)
    return Link(
        latency_ns=float(round(small * 1e9)),
        bytes_per_second=float(round(moved / max(large - small, 1e-9))),
    )


def _exchange(
    rank: int, ranks: int, port: int, device_type: str, timeout: float, results: Any
) -> None:
    """One of the processes of :func:`measure_link`."""
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else "cpu")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    seconds = []
    sizes = (2**12, 2**24)
    for size in sizes:
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
    if rank == 0:
        results.put((*seconds, sizes[1]))
    dist.destroy_process_group()
