"""Part 4: two figures of WLB-LLM with real kernels, every rank of a group in turn on one device.

Attention of one LLaMA2-7B layer (32 heads of 128); the latency of a context-parallel group is that
of its slowest rank. No collective runs. What is predicted and chosen goes by the profile of part 2.

* Figure 10: forward latency and achieved TFLOP/s of equal segments over their number of queries,
  with the keys that each reads fixed;
* *path*: our call over the kernel library's own function on the same segments;
* Figure 15: every sharding on windows of Generator A; of the paper's two the predicted choice and
  the better one ("optimal"); our choice, and over the best single sharding; attention split by
  heads; and the relative error of the predicted slowest rank.

A sharding whose ranks read more keys than ``most_keys`` is left out. A picture is drawn as far as
there are rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.context_parallel import PAPER, sequences
from benchmarks.gpu.kernels import Kernel, Segments
from benchmarks.gpu.profile import profile_for, profile_row
from benchmarks.gpu.recording import Figures, Row, Run
from benchmarks.sharding_latency import predicted_latency
from benchmarks.workloads import LLAMA2_7B_LAYER
from lightning_wlb.cost.flops import causal_pairs
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.sharding import (
    SHARDINGS,
    Layout,
    choose,
    layout,
    rank_indices,
)

SEED = 0  # of Generator A


@dataclass(frozen=True)
class Sizes:
    """Sizes of the segments in both figures.

    Args:
        queries: of Figure 10's segments.
        keys: that each of them reads.
        tokens: of one call in Figure 10.
        windows: of Figure 15.
        ranks: of Figure 15's groups.
        sequences: of each window.
        most_keys: that the ranks of a sharding may read.
    """

    queries: tuple[int, ...] = (16, 32, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048, 4096)
    keys: int = 8192
    tokens: int = 16_384
    windows: tuple[int, ...] = (65_536, 131_072)
    ranks: tuple[int, ...] = (4, 8, 16)
    sequences: int = 4
    most_keys: int = 1 << 20


SMALL = Sizes((16, 64), 64, 64, (512,), (2,), 1)


def rows(run: Run) -> list[Row]:
    """Figure 10, the path, and Figure 15 from the cheapest group on."""
    sizes = SMALL if run.small else Sizes()
    name = "tiny" if run.small else "7b"
    config = TransformerConfig.preset(name)
    kernel = Kernel(config.shape if run.small else LLAMA2_7B_LAYER, run.device)
    every = cache(lambda window: sequences(window, sizes.sequences, SEED))
    return [
        *(
            (f"figure 10, {queries} queries", partial(figure_10, kernel, sizes, queries))
            for queries in sizes.queries
        ),
        *(
            (
                f"path, {window}",
                lambda window=window: path(kernel, every(window)[0], sizes.ranks[0]),
            )
            for window in sizes.windows
        ),
        ("profile", partial(profile_row, run, name, config)),
        *(
            (
                f"figure 15, {window}, CP {ranks}",
                lambda window=window, ranks=ranks: figure_15(
                    kernel,
                    LatencyModel(profile_for(run, name), kernel.shape, Mesh(context=ranks)),
                    every(window),
                    ranks,
                    sizes.most_keys,
                ),
            )
            for window in sizes.windows
            for ranks in sizes.ranks
        ),
    ]


def figure_10(kernel: Kernel, sizes: Sizes, queries: int) -> dict[str, Any]:
    """Forward over equal segments of so many queries."""
    # As many segments for all short ones, so that latency shows the tile; enough for the device.
    count = max(sizes.tokens // max(queries, 256), 1)
    keys = max(sizes.keys, queries)
    ms = kernel.ms(([queries] * count, [keys] * count), backward=False)
    shape = kernel.shape
    flops = 4 * shape.heads * shape.head_dim * causal_pairs(queries, keys - queries) * count
    return {
        "queries": queries,
        "keys": keys,
        "segments": count,
        "forward_us_per_segment": 1e3 * ms / count,
        "forward_tflops": flops / ms / 1e9,
    }


def path(kernel: Kernel, lengths: list[int], ranks: int) -> dict[str, Any]:
    """Our call over that of the library's own function, on the segments of one rank."""
    segments = rank_segments(layout("hybrid", lengths, ranks, 1))[0]
    bare = kernel.bare_ms(segments)
    return {
        "segments": len(segments[0]),
        "bare_ms": bare,
        "ours_over_bare": kernel.ms(segments) / bare,
    }


def figure_15(
    kernel: Kernel, latency: LatencyModel, every: list[list[int]], ranks: int, most_keys: int
) -> dict[str, Any]:
    """Mean over sequences of the slowest rank's milliseconds, forward and backward."""
    times: dict[str, list[float]] = {
        name: []
        for name in (*SHARDINGS, "heads", "paper's choice", "optimal of the paper's", "our choice")
    }
    errors: list[float] = []
    for lengths in every:
        slowest: dict[str, float] = {}
        cost: dict[str, int] = {}
        for name in SHARDINGS:
            made = layout(name, lengths, ranks, 1)
            parts = rank_segments(made)
            if max(sum(keys) for _, keys in parts) > most_keys:
                continue
            slowest[name] = max(kernel.ms(part) if part[0] else 0.0 for part in parts)
            cost[name] = predicted_latency(made, latency.segment_cost)
            errors.append(max(predicted_ms(latency, part) for part in parts) / slowest[name] - 1)
        for name, ms in slowest.items():
            times[name].append(ms)
        times["heads"].append(kernel.ms((lengths, lengths), ranks=ranks))
        papers = [name for name in PAPER if name in slowest]
        if papers:
            times["paper's choice"].append(slowest[min(papers, key=cost.__getitem__)])
            times["optimal of the paper's"].append(min(slowest[name] for name in papers))
        ours, _ = choose(lengths, ranks, 1, latency.segment_cost)
        if ours in slowest:
            times["our choice"].append(slowest[ours])
    # A mean over fewer sequences than the others' would not compare.
    means = {name: float(np.mean(each)) for name, each in times.items() if len(each) == len(every)}
    best = min((means[name] for name in SHARDINGS if name in means), default=None)
    compared = best is not None and "our choice" in means
    return {
        "window": sum(every[0]),
        "ranks": ranks,
        "ms": means,
        "ours_over_best_single": means["our choice"] / best if compared else None,
        "predicted_error": [float(x) for x in np.percentile(errors, [5, 50, 95])],
    }


def rank_segments(made: Layout) -> list[Segments]:
    """Segments of each rank."""
    every = [rank_indices(made, rank) for rank in range(made.ranks)]
    return [
        (np.diff(each.cu_seqlens_q).tolist(), np.diff(each.cu_seqlens_k).tolist()) for each in every
    ]


def predicted_ms(latency: LatencyModel, segments: Segments) -> float:
    """Forward and backward of one rank by the device profile."""
    queries, keys = (np.array(part, dtype=np.int64) for part in segments)
    passes = (latency.attention_ns(queries, keys)[backward] for backward in (False, True))
    return sum(passes) / 1e6


def summary(done: Figures) -> dict[str, Any]:
    """The worst of what has a limit: our choice, the path, and errors of prediction."""
    groups = [row for name, row in done.items() if name.startswith("figure 15")]
    paths = [row["ours_over_bare"] for name, row in done.items() if name.startswith("path")]
    over = [row["ours_over_best_single"] for row in groups if row["ours_over_best_single"]]
    return {
        "worst_of_our_choice_over_best_single": max(over, default=None),
        "worst_path_over_bare": max(paths, default=None),
        "worst_median_error": max((abs(row["predicted_error"][1]) for row in groups), default=None),
    }


def draw(done: Figures, device: str, file: Path) -> None:
    """Both figures as one picture, as far as there are rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    segments = [row for name, row in done.items() if name.startswith("figure 10")]
    left.plot(
        [row["queries"] for row in segments], [row["forward_tflops"] for row in segments], "o-"
    )
    left.set_xscale("log", base=2)
    left.set(xlabel="queries of a segment", ylabel="TFLOP/s, forward", title=device)
    for row in (row for name, row in done.items() if name.startswith("figure 15")):
        base = row["ms"].get(PAPER[0])
        if base is not None:
            speed = [base / ms for ms in row["ms"].values()]
            label = f"{row['window'] // 1024}K, CP {row['ranks']}"
            right.plot(list(row["ms"]), speed, "o-", label=label)
    right.set(ylabel=f"speed over {PAPER[0]}", title="Slowest rank, forward + backward")
    right.tick_params(axis="x", rotation=30)
    if right.has_data():
        right.legend()
    figure.savefig(file, dpi=120)
