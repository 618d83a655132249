"""How evenly shardings spread attention over context-parallel ranks, what they send, their cost.

Sequences are the windows that ``original`` packing cuts from Generator A. The latency of a
sharding is that of its slowest rank under the reference kernel cost; the ideal is the cost of the
whole pieces, divided by the ranks. Nothing here ran on a device: every latency is **modelled**, and
such models overstated the gains that WLB-LLM measured by 2 to 5 times.

Bytes are the keys and values that a rank sends in one layer's forward (LLaMA2-7B, bfloat16, no
tensor parallelism), against an all-gather of all rows; what an all-gather sends is counted as
(ranks - 1) times a rank's part. Time is that of the choice and of one rank's index arithmetic.

Run ``python -m benchmarks.context_parallel --help``. Prints tables and then, as its last line, one
JSON object; ``--output FOLDER`` also writes it, with a picture and a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.sharding_latency import predicted_latency
from benchmarks.workloads import LLAMA2_7B_LAYER, generator_a, window_pieces
from lightning_wlb.cost.attention_tiles import SegmentCost, reference_kernel_cost
from lightning_wlb.sharding import (
    SHARDINGS,
    Layout,
    choose,
    layout,
    rank_indices,
    traffic,
    uses_all_to_all,
)

PAPER = ("per_sequence", "per_document")
KEY_VALUE_BYTES = 2 * 2 * LLAMA2_7B_LAYER.kv_heads * LLAMA2_7B_LAYER.head_dim

PROFILE = "h100"
HEAD_MODELS = (("7b", 1), ("7b", 4), ("llama3-8b", 1), ("llama3-8b", 2), ("70b", 8))
"""(preset, tensor-parallel ranks) in the comparison with attention split by heads."""

Shard = Callable[[list[int], int, SegmentCost], Layout]


def _adaptive(
    lengths: list[int], ranks: int, cost: SegmentCost, candidates: tuple[str, ...] | None = None
) -> Layout:
    if candidates is None:
        return choose(lengths, ranks, 1, cost)[1]
    made = [layout(name, lengths, ranks, 1) for name in candidates]
    return min(made, key=lambda each: predicted_latency(each, cost))


def _single(lengths: list[int], ranks: int, cost: SegmentCost, name: str) -> Layout:
    return layout(name, lengths, ranks, 1)


METHODS: dict[str, Shard] = {
    **{name: partial(_single, name=name) for name in PAPER},
    "adaptive of these (the paper's)": partial(_adaptive, candidates=PAPER),
    **{name: partial(_single, name=name) for name in SHARDINGS if name not in PAPER},
    "adaptive (ours)": _adaptive,
}


def sequences(window: int, count: int, seed: int) -> list[list[int]]:
    """The first windows of Generator A, each as the lengths of its pieces."""
    pieces = window_pieces(generator_a(max(count * window // 1000, 64), window, seed), window)
    ends = np.cumsum(pieces)
    cuts = np.searchsorted(ends, window * np.arange(1, count + 1)) + 1
    assert cuts[-1] <= len(pieces), "too few documents for so many windows"
    return [part.tolist() for part in np.split(pieces, cuts)[:count]]


def measure(
    method: Shard, every: list[list[int]], ranks: int, overhead: int
) -> dict[str, float | int]:
    """Modelled latency over the ideal, balance of rows, and rows sent."""
    cost = partial(reference_kernel_cost, overhead=overhead)
    latency, ideal, rows, sent, mean_sent, spread, whole = ([] for _ in range(7))
    for lengths in every:
        made = method(lengths, ranks, cost)
        sizes = np.array(lengths)
        latency.append(predicted_latency(made, cost))
        ideal.append(float(cost(sizes, sizes).sum()) / ranks)
        rows.append(made.rows * ranks / sum(lengths))
        moved = traffic(made).sum(axis=1)
        gathered = (ranks - 1) * made.shared
        busiest = uses_all_to_all(made, traffic(made))
        whole.append((ranks - 1) * made.rows)
        sent.append(int(moved.max()) if busiest else gathered)
        mean_sent.append(float(moved.mean()) if busiest else gathered)
        spread.append(busiest)
    ratio = np.array(latency) / np.array(ideal)
    plain = float(np.mean(whole)) * KEY_VALUE_BYTES / 2**20
    return {
        "modelled_max_over_ideal_mean": float(ratio.mean()),
        "modelled_max_over_ideal_p99": float(np.percentile(ratio, 99)),
        "modelled_max_over_ideal_aggregate": float(np.sum(latency) / np.sum(ideal)),
        "rows_max_over_mean": float(max(rows)),
        "plain_all_gather_mib": plain,
        "sent_busiest_rank_mib": float(np.mean(sent)) * KEY_VALUE_BYTES / 2**20,
        "sent_mean_rank_mib": float(np.mean(mean_sent)) * KEY_VALUE_BYTES / 2**20,
        "by_all_to_all": float(np.mean(spread)),
    }


def milliseconds(every: list[list[int]], ranks: int, repeats: int = 3) -> dict[str, float]:
    """CPU time of the choice and of one rank's indices, the best of some repeats."""
    spent = []
    for lengths in every:
        best = float("inf")
        for _ in range(repeats):
            begin = time.process_time()
            _, made = choose(lengths, ranks, 1)
            rank_indices(made, ranks // 2)
            best = min(best, time.process_time() - begin)
        spent.append(1e3 * best)
    return {"mean": float(np.mean(spent)), "p99": float(np.percentile(spent, 99))}


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each window, number of ranks, overhead and method."""
    result = []
    for window in arguments.windows:
        every = sequences(window, arguments.sequences, arguments.seed)
        for ranks in arguments.ranks:
            for overhead in arguments.overheads:
                for name, method in METHODS.items():
                    row: dict[str, Any] = {
                        "window": window,
                        "ranks": ranks,
                        "overhead_tiles": overhead,
                        "sharding": name,
                    }
                    for key, value in measure(method, every, ranks, overhead).items():
                        row[key] = round(value, 5)
                    result.append(row)
    return result


def markdown(table: list[dict[str, Any]]) -> str:
    """What the paper's choice and ours are modelled to reach, and what they send."""
    by = {
        (row["window"], row["ranks"], row["overhead_tiles"], row["sharding"]): row for row in table
    }
    names = ("adaptive of these (the paper's)", "adaptive (ours)")
    cells = []
    for key in sorted({key[:3] for key in by}):
        window, ranks, overhead = key
        paper, ours = (by[*key, name] for name in names)
        cells.append([
            f"{window // 1024}K", str(ranks), str(overhead),
            f"{paper['modelled_max_over_ideal_mean']:.3f}",
            f"{ours['modelled_max_over_ideal_mean']:.4f}",
            f"{paper['sent_busiest_rank_mib']:.0f}", f"{ours['sent_busiest_rank_mib']:.0f}",
            f"{ours['plain_all_gather_mib']:.0f}",
        ])  # fmt: skip
    headings = (
        "window", "CP", "overhead, tiles", "paper's choice", "ours", "MiB, paper's", "ours",
        "plain",
    )  # fmt: skip
    lines = [
        "Attention latency of the slowest rank / ideal (mean, **modelled**), and MiB that the",
        "busiest rank sends in a layer's forward; `python -m benchmarks.context_parallel`.",
        "",
        *report.markdown_table(headings, cells),
    ]
    return "\n".join(lines) + "\n"


def draw(table: list[dict[str, Any]], overhead: int, path: Path) -> None:
    """Modelled latency over the ideal and bytes sent, over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in table if row["overhead_tiles"] == overhead]
    windows = sorted({row["window"] for row in rows})
    figure, axes = pyplot.subplots(
        2, len(windows), figsize=(6 * len(windows), 8), squeeze=False, layout="constrained"
    )
    for column, window in enumerate(windows):
        top, bottom = axes[0][column], axes[1][column]
        for name in METHODS:
            of = [row for row in rows if row["window"] == window and row["sharding"] == name]
            ranks = [str(row["ranks"]) for row in of]
            style = {"linewidth": 3 if name == "adaptive (ours)" else 1, "marker": "o"}
            top.plot(
                ranks, [row["modelled_max_over_ideal_mean"] for row in of], label=name, **style
            )
            bottom.plot(ranks, [row["sent_busiest_rank_mib"] for row in of], **style)
        plain = [row["plain_all_gather_mib"] for row in of]
        bottom.plot(ranks, plain, "k--", label="plain all-gather")
        top.set(
            title=f"{window // 1024}K tokens of Generator A (modelled)",
            ylabel="attention latency, slowest rank / ideal",
        )
        bottom.set(xlabel="context-parallel ranks", ylabel="MiB sent by the busiest rank", ylim=0)
        bottom.legend()
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


def show(table: list[dict[str, Any]], times: list[dict[str, Any]], console: Console) -> None:
    """One table for each window and overhead, then the time of the index arithmetic."""
    headings = (
        "sharding", "CP", "mean", "p99", "aggregate", "rows max/mean", "MiB sent, busiest rank",
        "mean rank", "plain all-gather", "by all-to-all",
    )  # fmt: skip
    for window, overhead in sorted({(row["window"], row["overhead_tiles"]) for row in table}):
        title = (
            f"Modelled attention latency, max over ranks / ideal: {window // 1024}K tokens,"
            f" overhead {overhead} tile(s)"
        )
        rows = [
            [
                row["sharding"],
                str(row["ranks"]),
                f"{row['modelled_max_over_ideal_mean']:.4f}",
                f"{row['modelled_max_over_ideal_p99']:.3f}",
                f"{row['modelled_max_over_ideal_aggregate']:.4f}",
                f"{row['rows_max_over_mean']:.5f}",
                f"{row['sent_busiest_rank_mib']:.0f}",
                f"{row['sent_mean_rank_mib']:.0f}",
                f"{row['plain_all_gather_mib']:.0f}",
                f"{row['by_all_to_all']:.0%}",
            ]
            for row in table
            if (row["window"], row["overhead_tiles"]) == (window, overhead)
        ]
        console.print(report.table(title, headings, rows))
    for each in times:
        console.print(
            f"{each['window'] // 1024}K, CP {each['ranks']}: choice and one rank's indices"
            f" {each['mean']:.2f} ms of one core per micro-batch (p99 {each['p99']:.2f})"
        )


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("context_parallel", __doc__)
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[131_072, 65_536], help="default 131072 65536"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="default 4 8 16")
    parser.add_argument("--sequences", type=int, default=200, help="per window (default 200)")
    parser.add_argument(
        "--overheads", type=int, nargs="+", default=[2, 1, 3], help="tiles (default 2 1 3)"
    )
    parser.add_argument("--output", type=Path, help="folder for the JSON and the picture")
    parser.add_argument("--seed", type=int, default=0, help="of Generator A (default 0)")
    arguments = parser.parse_args(argv)
    table = rows(arguments)
    times = [
        {
            "window": window,
            "ranks": ranks,
            **milliseconds(sequences(window, arguments.sequences, arguments.seed), ranks),
        }
        for window in arguments.windows
        for ranks in arguments.ranks
    ]
    console = Console(width=160)
    show(table, times, console)
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    made = {
        "benchmark": "context_parallel",
        "modelled": True,
        **settings,
        "rows": table,
        "milliseconds": times,
    }
    if not arguments.output:
        report.finish(made)
        return
    saved = arguments.output / "context_parallel"
    report.finish(made, saved, lambda _: markdown(table))
    draw(table, arguments.overheads[0], saved.with_suffix(".png"))


if __name__ == "__main__":
    main()
