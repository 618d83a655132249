"""A coarser measurement of a device, for the start of a run: seconds in place of minutes.

The same kernels and layers as for a profile that is kept, at fewer points, and nothing is held out
of the fit. Rates between the points are interpolated as always, which is exact for a time that is
proportional beside a constant. How large the points are follows from the speed of a matrix product
and from how much of the processor other processes leave, so that attention and layers take two
fifths of the time each at most; points that would begin after its end are left out. The link is not
measured, since other processes would be needed.

Cost: half of the time given, mostly. Not for an error to quote: ``lightning-wlb profile`` has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_wlb.cost.flops import causal_pairs, head_flops, layer_linear_flops
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling import measure
from lightning_wlb.profiling.bench import Bench
from lightning_wlb.profiling.grid import Grid, segments

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Most rows, and most queries: the largest that there is time for."""
CALLS = 4
"""Of everything measured; the first of them warms up."""


def measure_quickly(
    config: TransformerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
    seconds: float = 20.0,
    report: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a device; its link is taken to be as fast as its memory.

    Args:
        config: whose layers and head are run.
        device: to measure.
        dtype: to compute in.
        backend: of attention.
        seconds: after which no larger point is begun.
        report: called with what is being measured.

    Raises:
        ValueError: a dtype that profiles do not know.
        TimeoutError: the smallest points would take longer.
    """
    begin, own = time.monotonic(), time.process_time()
    speed = Bench(config, device, dtype, _grid(32, 32, 32)).best_product()
    share = (time.process_time() - own) / (time.monotonic() - begin)
    if device.type == "cpu" and share < 1:  # its clock leaves out what other processes take
        speed *= share
    return measure(
        config,
        name="automatic",
        device=device,
        dtype=dtype,
        grid=grid_of(config.shape, speed, seconds, device.type),
        links=False,
        report=report,
        backend=backend,
        until=begin + seconds,
    )


def grid_of(shape: ModelShape, speed: float, seconds: float, device_type: str) -> Grid:
    """Where to measure so that attention and layers take two fifths of the time each.

    Args:
        shape: of the model.
        speed: FLOP/s of a large matrix product; half of it is expected of layers and of attention.
        seconds: for all of it.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        TimeoutError: the smallest would take longer.
    """
    least = 32 if device_type == "cpu" else 256
    layer, usable = shape.each_layer[0], 0.4 * seconds * speed / 2 / CALLS  # FLOPs

    def layers(most: int) -> float:
        # Stages of one and of three layers, and the head: forward, backward and its logits again.
        return sum(
            4 * 3 * layer_linear_flops(layer, rows) + 4 * head_flops(shape, rows)
            for rows in _points(least, most)
        )

    def attention(most: int) -> float:
        grid = _grid(least, most, least)
        points = [
            (queries, round(queries * ratio))
            for queries in grid.queries
            for ratio in grid.keys_per_query
        ]
        cuda, budget = device_type == "cuda", 2**62
        return sum(
            14
            * layer.heads
            * layer.head_width
            * causal_pairs(queries, keys - queries)
            * segments(grid, shape, 4, queries, keys, cuda=cuda, budget=budget)
            for queries, keys in points
        )

    def largest(cost: Callable[[int], float]) -> int:
        fitting = [size for size in SIZES if cost(size) <= usable]
        if not fitting:
            raise TimeoutError(
                f"layers of width {shape.dim} would take more than {0.4 * seconds:.0f} s here"
            )
        return fitting[-1]

    return _grid(least, largest(attention), largest(layers))


def _grid(least: int, queries: int, rows: int) -> Grid:
    """Up to so many queries and rows, from the least."""
    return Grid(
        queries=_points(least // 2, queries),
        keys_per_query=(1.0, 4.0, 16.0),
        pairs=queries**2,
        rows=_points(least, rows),
        repeats=CALLS - 1,
        held_out=0,
    )


def _points(least: int, most: int) -> tuple[int, ...]:
    """From ``least`` in steps of eight, and ``most``."""
    points = [least]
    while 4 * points[-1] < most:
        points.append(8 * points[-1])
    return (*(each for each in points if each < most), max(most, least))
