"""Measures this device with the real kernels and layers, and writes what it finds as a profile.

* The attention kernel alone, forward and backward, over a grid of queries and keys.
* Pipeline stages of the reference decoder with one and with three layers over a grid of rows,
  attention timed apart: the difference is two layers, what is left of one stage its overhead.
* The two ends of the model in the same way.
* A stream of element-wise work for the memory's bandwidth.
* Two processes that exchange small and large messages, for the link within a node.
* Then random micro-batches that were in no grid, whole stages forward and backward: the median and
  the worst relative error of the prediction go into the profile (``errors``).

On a CPU with one thread, times are the thread's own CPU time, as in the strategy's stopwatch, so
that a busy machine disturbs the result little; on CUDA they are events on the stream. The CUDA
branch is written for one busy device and has not been run by this project yet.

Cost: one to two minutes on a CPU. A profile of small layers says little about large ones: profile
the layers that will run. Links between nodes are not measured; add them by hand.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling.bench import CPU_GRID, CUDA_GRID, Bench, Grid
from lightning_wlb.profiling.links import measure_link

__all__ = ["Grid", "measure", "measure_link"]


def measure(
    config: TransformerConfig,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    grid: Grid | None = None,
    links: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a device.

    Args:
        config: whose layers and ends are run; their number of layers does not matter.
        name: of the profile.
        device: to measure.
        dtype: to compute in.
        grid: where to measure; by default one for the kind of device.
        links: whether to measure the link between two processes of this node (and not to know
            it otherwise: the profile then has the memory's bandwidth in its place, and says so).
        report: told what is being measured.

    Returns:
        A measured profile. ``errors`` has the relative errors on held-out micro-batches.

    Raises:
        ValueError: a dtype that profiles do not know.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype_name not in DTYPE_BYTES:
        raise ValueError(f"cannot profile {dtype_name}: known are {', '.join(DTYPE_BYTES)}.")
    grid = grid or (CUDA_GRID if device.type == "cuda" else CPU_GRID)
    bench = Bench(config, device, dtype, grid)
    report("attention kernel")
    attention = bench.attention()
    report("layers, ends and overhead")
    stages = bench.stages()
    report("memory bandwidth")
    bandwidth = bench.element_bytes_per_second(stages)
    layer, head = bench.tables(stages, bandwidth)
    sources = [_what_was_measured(config, device, grid)]
    if links:
        report("link between two processes")
        link = measure_link(device)
        sources.append("Link within the node: two processes, all-gathers of 4 KiB and 16 MiB each.")
    else:
        link = Link(0.0, bandwidth)
        sources.append("Link within the node: not measured, the memory's bandwidth stands for it.")
    peak = get_available_flops(device, dtype) if device.type == "cuda" else None
    nodes = torch.cuda.device_count() if device.type == "cuda" else _share_of_cores()
    profile = Profile(
        name=name,
        device=_device_name(device),
        device_type=device.type,
        dtype=dtype_name,
        measured=True,
        sources=tuple(sources),
        date=datetime.date.today().isoformat(),
        peak_flops=float(peak or bench.best_product()),
        memory_bytes=_memory_bytes(device) // (1 if device.type == "cuda" else nodes),
        devices_per_node=nodes,
        element_bytes_per_second=bandwidth,
        attention=(attention,),
        layer=layer,
        head=head,
        action=stages.overhead,
        links={"node": link},
        versions={"torch": torch.__version__, "python": platform.python_version()},
        shape=asdict(config.shape),
    )
    report("micro-batches held out of the fit")
    return replace(profile, errors=bench.errors(profile))


def _what_was_measured(config: TransformerConfig, device: torch.device, grid: Grid) -> str:
    clock = "events on the stream" if device.type == "cuda" else "the thread's own CPU time"
    if device.type == "cpu" and torch.get_num_threads() > 1:
        clock = "wall-clock time"
    threads = "" if device.type == "cuda" else f" on {torch.get_num_threads()} thread(s)"
    shape = config.shape
    return (
        f"Measured{threads} by lightning-wlb profile, medians of {grid.repeats} by {clock}: the"
        f" attention kernel with {shape.heads} heads of {shape.head_dim}, and decoder layers of"
        f" dim {shape.dim}, feed-forward {shape.ffn_dim}, vocabulary {shape.vocab_size}."
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _share_of_cores() -> int:
    """Ranks of as many threads as this process has that the machine's cores can hold."""
    return max((os.cpu_count() or 1) // torch.get_num_threads(), 1)
