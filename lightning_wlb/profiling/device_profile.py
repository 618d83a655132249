"""Measures this device with the real kernels and layers, and makes a device profile of it.

:func:`measure` makes the profile that ``lightning-wlb profile`` keeps, in 1 to 2 minutes on a CPU:

* the attention kernel alone, forward and backward, over a grid of queries and keys;
* pipeline stages of the reference decoder with one and with three layers over a grid of rows,
  attention timed apart: the difference is two layers, the rest of a stage its overhead;
* the output projection with the loss, in the same way;
* a stream of element-wise work for the memory's bandwidth;
* two processes that exchange small and large messages, for the link within a node;
* whole stages, forward and backward, on micro-batches that no grid has: windows of document lengths
  like those of long-context pretraining (:mod:`lightning_wlb.planning.synthetic_lengths`). The
  median and the worst relative error of their prediction go into the profile (``errors``).

:mod:`.call_timer` says what counts as time. The CUDA branch has not been run by this project yet.

A profile of small layers says little about large ones: profile the layers that will run. Links
between nodes are not measured; add them by hand.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from lightning_wlb.attention.backends import kernel_name
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling.device import device_name, memory_bytes, peak_flops
from lightning_wlb.profiling.link_speed import measure_link
from lightning_wlb.profiling.measured_points import GRIDS, Grid
from lightning_wlb.profiling.measurements import DeviceBench


def measure(
    config: TransformerConfig,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    grid: Grid | None = None,
    links: bool = True,
    backend: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a device in full.

    Args:
        config: the decoder whose layers and head are run; its number of layers does not matter.
        grid: points to measure; by default the grid for the kind of device.
        links: whether to measure the link between two processes of this node. If not, or with one
            GPU, the memory's bandwidth replaces it, and the profile says so.

    Raises:
        ValueError: a missing backend, or layers that exceed the memory even with the fewest rows.
    """
    cuda = device.type == "cuda"
    grid = grid or GRIDS[device.type]
    bench = DeviceBench(config, device, dtype, grid, backend)
    report("attention kernel")
    attention = bench.attention()
    report("layers, head and overhead")
    stages = bench.stages()
    report("memory bandwidth")
    bandwidth = bench.element_bytes_per_second(stages)
    layer, head = bench.tables(stages, bandwidth)
    sources = [_what_was_measured(config, device, grid)]
    if links:
        report("link between two processes")
    link = measure_link(device) if links else None
    if link is None:
        link = Link(0.0, bandwidth)
        sources.append("Link within the node: not measured, the memory's bandwidth stands for it.")
    else:
        sources.append("Link within the node: two processes, all-gathers of 4 KiB and 16 MiB each.")
    # The number of ranks that the node can hold if each has as many threads as this process.
    ranks = max((os.cpu_count() or 1) // torch.get_num_threads(), 1)
    if cuda:
        ranks = torch.cuda.device_count()
    profile = Profile(
        name=name,
        device=device_name(device),
        device_type=device.type,
        dtype=str(dtype).removeprefix("torch."),
        measured=True,
        sources=tuple(sources),
        date=datetime.date.today().isoformat(),
        peak_flops=peak_flops(device, dtype) or bench.best_product(),
        memory_bytes=memory_bytes(device) // (1 if cuda else ranks),
        devices_per_node=ranks,
        element_bytes_per_second=bandwidth,
        attention=(attention,),
        layer=layer,
        head=head,
        action=stages.overhead,
        links={"node": link},
        shape=asdict(config.shape),
        errors={},
        kernel=kernel_name(backend, device),
        eager_factor=1.0,
        sustained=1.0,
        slowed_beside=1.0,
    )
    report("micro-batches held out of the fit")
    return replace(profile, errors=bench.errors(profile))


def _what_was_measured(config: TransformerConfig, device: torch.device, grid: Grid) -> str:
    shape, threads = config.shape, torch.get_num_threads()
    if device.type == "cuda":
        where, clock = "", "events on a stream that the host keeps full"
    else:
        where = f" on {threads} thread(s)"
        clock = "the thread's own CPU time" if threads == 1 else "wall-clock time"
    return (
        f"Measured{where} with torch {torch.__version__} by lightning-wlb profile, medians of"
        f" {grid.repeats} by {clock}: the attention kernel with {shape.heads} heads of"
        f" {shape.head_dim}, and decoder layers of dim {shape.dim}, feed-forward"
        f" {shape.ffn_dim}, vocabulary {shape.vocab_size}."
    )
