"""The link between two processes of one node, by messages small and large.

The CUDA half has not been run by this project.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_wlb.cost.profile import Link
from lightning_wlb.distributed.collectives import all_gather_into
from lightning_wlb.profiling.ranks import run_ranks

SIZES = (2**12, 2**24)
"""Bytes of the small and the large message."""


def measure_link(device: torch.device, timeout_seconds: float = 60.0) -> Link | None:
    """Latency and bandwidth between two processes of this node, by all-gather.

    None on CUDA with one device: the two processes cannot have one each, and there is no link.

    Args:
        device: of the kind to measure.
        timeout_seconds: for the whole measurement.
    """
    cuda = device.type == "cuda"
    if cuda and torch.cuda.device_count() < 2:
        return None
    backend = "nccl" if cuda else "gloo"
    small, large = run_ranks(_exchange, 2, device.type, timeout=timeout_seconds, backend=backend)[0]
    return _link(small, large, 2)


def link_of_ranks(device: torch.device) -> Link:
    """The same between all ranks of a run, which are on one node; collective over them.

    Each may measure a little differently.
    """
    return _link(*_seconds(device), dist.get_world_size())


def _link(small: float, large: float, ranks: int) -> Link:
    """From the seconds of either size, between so many ranks."""
    moved = _of_a_rank(SIZES[1], ranks)
    return Link(
        latency_ns=float(round(small * 1e9)),
        bytes_per_second=float(round((ranks - 1) * moved / max(large - small, 1e-9))),
    )


def _of_a_rank(size: int, ranks: int) -> int:
    """Bytes that a rank sends, so that what it receives does not grow with their number."""
    return max(2 * size // ranks // 4, 1) * 4


def _exchange(rank: int, device_type: str) -> tuple[float, float]:
    return _seconds(torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu"))


def _seconds(device: torch.device) -> tuple[float, float]:
    """Seconds of an all-gather of either size, as one of the ranks has them."""
    cuda, ranks = device.type == "cuda", dist.get_world_size()
    # A message may take less than the host needs to queue it and to wait for it: several in a row.
    messages = 10 if cuda else 1
    seconds = []
    for size in SIZES:
        mine = torch.zeros(_of_a_rank(size, ranks) // 4, device=device)
        everyone = torch.zeros(ranks * len(mine), device=device)
        samples = []
        for _ in range(15):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(messages):
                all_gather_into(everyone, mine)
            if cuda:
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - begin) / messages)
        # The fastest, which what else runs on the machine disturbs least.
        seconds.append(min(samples))
    return seconds[0], seconds[1]
