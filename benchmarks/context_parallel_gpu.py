"""Attention of every rank of a context-parallel group, in turn, on one CUDA device.

Real kernels on the segments that each sharding gives each rank: forward and backward of one
LLaMA2-7B layer (32 heads of 128, bfloat16) by CUDA events; the group's latency is that of its
slowest rank. No collective runs. Two results:

* ``segments`` (WLB-LLM Figure 10): forward latency and achieved TFLOP/s over the number of queries
  of equal segments, with the keys each of them reads fixed;
* ``shardings`` (WLB-LLM Figure 15): every sharding on windows of Generator A, the paper's choice
  between two of them by the reference kernel cost, the best of the two, and the default choice;
  with the ratio of measured to predicted latency, scaled to a median of 1.

Not yet run by this project, which had no CUDA device while it was written: expect to fix details.
A sharding whose ranks read more keys than ``--most-keys`` (PTRR on long documents) is left out.

Run ``python -m benchmarks.context_parallel_gpu --help``. Prints tables and then, as its last line,
one JSON object; ``--output`` also writes it, and a picture, to a folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.context_parallel import PAPER, sequences
from benchmarks.workloads import LLAMA2_7B_LAYER
from lightning_wlb.attention.sharding import (
    SHARDINGS,
    Layout,
    choose,
    layout,
    predicted_latency,
    rank_indices,
)
from lightning_wlb.attention.varlen import AttentionMetadata, VarlenAttention
from lightning_wlb.cost.flops import causal_pairs

HEADS, KV_HEADS, HEAD_DIM = (
    LLAMA2_7B_LAYER.heads,
    LLAMA2_7B_LAYER.kv_heads,
    LLAMA2_7B_LAYER.head_dim,
)
WARM_UP = 2
REPEATS = 5


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of a call on the device, after warming up."""
    for _ in range(WARM_UP):
        function()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def attention_ms(
    attention: VarlenAttention, queries: list[int], keys: list[int], backward: bool = True
) -> float:
    """Forward, and backward unless told otherwise, of one kernel call over segments."""
    metadata = AttentionMetadata(
        rows=sum(queries),
        queries=sum(queries),
        cu_seqlens_q=torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32),
        cu_seqlens_k=torch.tensor(np.cumsum([0, *keys]), dtype=torch.int32),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        # Only its length is looked at: keys are given in the order of the segments.
        key_index=torch.empty(sum(keys), dtype=torch.int64),
    ).to("cuda")
    q, k, v, gradient = (
        torch.randn(count, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for count, heads in (
            (sum(queries), HEADS),
            (sum(keys), KV_HEADS),
            (sum(keys), KV_HEADS),
            (sum(queries), HEADS),
        )
    )
    for leaf in (q, k, v):
        leaf.requires_grad_(backward)

    def run() -> None:
        out = attention(q, k, v, metadata)
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    return milliseconds(run)


def segments(attention: VarlenAttention, tokens: int, keys: int) -> list[dict[str, float]]:
    """Figure 10: forward over equal segments of 16 to 4096 queries, ``keys`` keys each."""
    rows = []
    for length in (16, 32, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048, 4096):
        # As many segments for all, so that latency shows the tile, and enough to fill the device.
        count = max(tokens // max(length, 256), 1)
        ms = attention_ms(attention, [length] * count, [keys] * count, backward=False)
        pairs = causal_pairs(length, keys - length) * count
        flops = 4 * HEADS * HEAD_DIM * pairs
        rows.append(
            {
                "queries": length,
                "keys": keys,
                "segments": count,
                "forward_us_per_segment": 1e3 * ms / count,
                "forward_tflops": flops / ms / 1e9,
            }
        )
    return rows


def group_ms(attention: VarlenAttention, made: Layout, most_keys: int) -> list[float] | None:
    """Each rank's forward and backward; None where a rank reads too many keys to hold."""
    parts = []
    for rank in range(made.ranks):
        indices = rank_indices(made, rank)
        parts.append((np.diff(indices.cu_seqlens_q), np.diff(indices.cu_seqlens_k)))
    if max(int(keys.sum()) for _, keys in parts) > most_keys:
        return None
    return [
        attention_ms(attention, queries.tolist(), keys.tolist()) if len(queries) else 0.0
        for queries, keys in parts
    ]


def shardings(
    attention: VarlenAttention, every: list[list[int]], ranks: int, most_keys: int
) -> dict[str, Any]:
    """Figure 15: mean over sequences of the slowest rank's milliseconds, for each sharding."""
    slowest: dict[str, list[float]] = {name: [] for name in SHARDINGS}
    chosen: dict[str, list[float]] = {"paper's choice": [], "best of the paper's": [], "ours": []}
    ratios: list[float] = []
    for lengths in every:
        latency: dict[str, float] = {}
        predicted: dict[str, int] = {}
        for name in SHARDINGS:
            made = layout(name, lengths, ranks, 1)
            times = group_ms(attention, made, most_keys)
            if times is None:
                continue
            latency[name] = max(times)
            predicted[name] = predicted_latency(made)
            slowest[name].append(latency[name])
            ratios.append(latency[name] / predicted[name])
        chosen["paper's choice"].append(latency[min(PAPER, key=predicted.__getitem__)])
        chosen["best of the paper's"].append(min(latency[name] for name in PAPER))
        chosen["ours"].append(latency[choose(lengths, ranks, 1)[0]])
    scaled = np.array(ratios) / np.median(ratios)
    return {
        # A mean over fewer sequences than the others' would not compare.
        "ms": {
            name: float(np.mean(times))
            for name, times in {**slowest, **chosen}.items()
            if len(times) == len(every)
        },
        "measured_over_predicted": [float(x) for x in np.percentile(scaled, [5, 50, 95])],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Both figures as tables."""
    table = Table(title=f"Segments of {result['keys']} keys, forward, measured: {result['device']}")
    for title in ("queries", "segments", "us per segment", "TFLOP/s"):
        table.add_column(title, justify="right")
    for row in result["segments"]:
        table.add_row(
            str(row["queries"]),
            str(row["segments"]),
            f"{row['forward_us_per_segment']:.1f}",
            f"{row['forward_tflops']:.0f}",
        )
    console.print(table)
    table = Table(title="Slowest rank, forward + backward of one layer, ms, measured")
    names = list(dict.fromkeys(name for row in result["shardings"] for name in row["ms"]))
    for title in ("window", "CP", *names, "measured / predicted 5-95 %"):
        table.add_column(title, justify="right")
    for row in result["shardings"]:
        low, _, high = row["measured_over_predicted"]
        table.add_row(
            f"{row['window'] // 1024}K",
            str(row["ranks"]),
            *(f"{row['ms'][name]:.2f}" if name in row["ms"] else "-" for name in names),
            f"{low:.2f}-{high:.2f}",
        )
    console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """Both figures as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    queries = [row["queries"] for row in result["segments"]]
    left.semilogx(queries, [row["forward_tflops"] for row in result["segments"]], "o-", base=2)
    left.set(xlabel="queries of a segment", ylabel="TFLOP/s, forward", title=result["device"])
    for row in result["shardings"]:
        base = row["ms"]["per_sequence"]
        right.plot(
            list(row["ms"]),
            [base / ms for ms in row["ms"].values()],
            "o-",
            label=f"{row['window'] // 1024}K, CP {row['ranks']}",
        )
    right.set(ylabel="speed over per_sequence", title="Slowest rank, forward + backward")
    right.tick_params(axis="x", rotation=30)
    right.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_parallel_gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[65_536, 131_072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--sequences", type=int, default=8, help="per window (default 8)")
    parser.add_argument("--keys", type=int, default=8192, help="of Figure 10's segments")
    parser.add_argument("--most-keys", type=int, default=1 << 20, help="default 1048576")
    parser.add_argument("--seed", type=int, default=0, help="of Generator A (default 0)")
    parser.add_argument("--backend", default="auto", help="torch, flash or auto (default)")
    parser.add_argument("--output", type=Path, help="folder for the JSON and the picture")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "This benchmark measures kernels on a CUDA device, and there is none.\n")
    attention = VarlenAttention(arguments.backend)
    result: dict[str, Any] = {
        "benchmark": "context_parallel_gpu",
        "measured": True,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "backend": arguments.backend,
        "sequences": arguments.sequences,
        "keys": arguments.keys,
        "segments": segments(attention, 16_384, arguments.keys),
        "shardings": [
            {
                "window": window,
                "ranks": ranks,
                **shardings(
                    attention,
                    sequences(window, arguments.sequences, arguments.seed),
                    ranks,
                    arguments.most_keys,
                ),
            }
            for window in arguments.windows
            for ranks in arguments.ranks
        ],
    }
    show(result, Console(width=160))
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        draw(result, arguments.output / "context_parallel_gpu.png")
        (arguments.output / "context_parallel_gpu.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
