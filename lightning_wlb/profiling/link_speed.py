"""Measures the link between two processes of one node with small and large messages.

The CUDA half has not been run by this project.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_wlb.cost.profile import Link
from lightning_wlb.data.loader_workers import safe_path
from lightning_wlb.distributed.collectives import all_gather_into

SIZES = (2**12, 2**24)
"""Bytes of the small and the large message."""


def measure_link(device: torch.device) -> Link | None:
    """Latency and bandwidth between two processes of this node, by all-gather.

    The result is None on CUDA with one device, where there is no link to measure.
    """
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    context = multiprocessing.get_context("forkserver")
    with (
        safe_path(),
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(2, context) as pool,
    ):
        arguments = device.type, f"file://{folder}/rendezvous"
        ranks = [pool.submit(_seconds_of_rank, rank, *arguments) for rank in range(2)]
        (small, large), _ = (rank.result() for rank in ranks)
    return Link(
        latency_ns=float(round(small * 1e9)),
        bytes_per_second=float(round(SIZES[1] / max(large - small, 1e-9))),
    )


def _seconds_of_rank(rank: int, device_type: str, rendezvous: str) -> tuple[float, float]:
    """:func:`_seconds` in one of two new processes."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)  # else NCCL would put both ranks on the first device
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=1),
        device_id=device if device_type == "cuda" else None,
    )
    try:
        return _seconds(device)
    finally:
        dist.destroy_process_group()


def _seconds(device: torch.device) -> tuple[float, float]:
    """Seconds of a small and of a large all-gather, as this rank measures them."""
    cuda = device.type == "cuda"
    # Several in a row, as a message may take less time than the host needs to queue it and to wait.
    messages = 10 if cuda else 1
    seconds = []
    for size in SIZES:
        mine = torch.zeros(size // 4, device=device)
        everyone = torch.zeros(2 * len(mine), device=device)
        samples = []
        for _ in range(15):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(messages):
                all_gather_into(everyone, mine)
            if cuda:
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - begin) / messages)
        # The fastest sample is disturbed least by other programs of the machine.
        seconds.append(min(samples))
    return seconds[0], seconds[1]
