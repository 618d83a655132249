"""Attention of every rank of a context-parallel group, in turn, on one CUDA device.

Real kernels on the segments that each sharding gives each rank: forward and backward of one
LLaMA2-7B layer (32 heads of 128, bfloat16) by CUDA events; the group's latency is that of its
slowest rank. No collective runs. The device is profiled first, unless ``--profile`` names a file,
and what is predicted and chosen goes by that profile. Results:

* ``segments`` (WLB-LLM Figure 10): forward latency and achieved TFLOP/s over the number of queries
  of equal segments, with the keys each of them reads fixed;
* ``shardings`` (WLB-LLM Figure 15): every sharding on windows of Generator A; of the paper's two
  the predicted choice and the better one ("optimal"); our choice; attention split by heads
  (``heads``, each rank alike); our choice over the best single sharding; and the relative error of
  the predicted slowest rank;
* ``path``: our call over the kernel library's own function on the same segments.

Not yet run by this project, which had no CUDA device while it was written; its tests run it on a
CPU. A sharding whose ranks read more keys than ``--most-keys`` is left out.

Run ``python -m benchmarks.context_parallel_gpu``; ``--help`` lists the options. Prints tables and
then, as its last line, one JSON object. ``--output`` (default benchmarks/results) gets that, a
picture, and the measured profile, which ``lightning-wlb plan --profile`` takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn.attention.varlen import varlen_attn

from benchmarks import report
from benchmarks.context_parallel import PAPER, sequences
from benchmarks.workloads import LLAMA2_7B_LAYER
from lightning_wlb.attention.kernels_gpu import flash_library
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.varlen import VarlenAttention
from lightning_wlb.cost.flops import causal_pairs
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling import measure
from lightning_wlb.sharding import (
    HEADS,
    SHARDINGS,
    Layout,
    choose,
    layout,
    predicted_latency,
    rank_indices,
)

HEAD_DIM = LLAMA2_7B_LAYER.head_dim
DEVICE = "cuda"
DTYPE = torch.bfloat16
WARM_UP = 2
REPEATS = 5
LENGTHS = (16, 32, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048, 4096)

Segments = tuple[list[int], list[int]]
"""Queries and keys of each segment."""


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


def inputs(
    segments: Segments, heads: int, kv_heads: int
) -> tuple[list[torch.Tensor], torch.Tensor, AttentionMetadata]:
    """Random q, k, v, an output gradient, and the metadata of one kernel call."""
    queries, keys = segments
    metadata = AttentionMetadata(
        rows=sum(queries),
        queries=sum(queries),
        cu_seqlens_q=torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32),
        cu_seqlens_k=torch.tensor(np.cumsum([0, *keys]), dtype=torch.int32),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        # Only its length is looked at: keys are given in the order of the segments.
        key_index=torch.empty(sum(keys), dtype=torch.int64),
    ).to(DEVICE)
    q, k, v, gradient = (
        torch.randn(count, number, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        for count, number in (
            (sum(queries), heads),
            (sum(keys), kv_heads),
            (sum(keys), kv_heads),
            (sum(queries), heads),
        )
    )
    return [q, k, v], gradient, metadata


def kernel_ms(
    call: Callable[..., torch.Tensor],
    leaves: list[torch.Tensor],
    gradient: torch.Tensor,
    backward: bool = True,
) -> float:
    """Forward, and backward unless told otherwise, of ``call(q, k, v)``."""
    for leaf in leaves:
        leaf.requires_grad_(backward)

    def run() -> None:
        out = call(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, gradient)

    return milliseconds(run)


def attention_ms(
    attention: VarlenAttention, segments: Segments, *, ranks: int = 1, backward: bool = True
) -> float:
    """One call over segments, of the heads of one of ``ranks`` ranks that split them."""
    shape = LLAMA2_7B_LAYER
    leaves, gradient, metadata = inputs(segments, shape.heads // ranks, shape.kv_heads // ranks)
    return kernel_ms(lambda q, k, v: attention(q, k, v, metadata), leaves, gradient, backward)


def figure_10(attention: VarlenAttention, tokens: int, keys: int) -> list[dict[str, float]]:
    """Forward over equal segments of 16 to 4096 queries, ``keys`` keys each."""
    rows = []
    for length in LENGTHS:
        # As many segments for all, so that latency shows the tile, and enough to fill the device.
        count = max(tokens // max(length, 256), 1)
        ms = attention_ms(attention, ([length] * count, [keys] * count), backward=False)
        pairs = causal_pairs(length, keys - length) * count
        flops = 4 * LLAMA2_7B_LAYER.heads * HEAD_DIM * pairs
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


def rank_segments(made: Layout) -> list[Segments]:
    """Segments of each rank."""
    parts = []
    for rank in range(made.ranks):
        indices = rank_indices(made, rank)
        parts.append(
            (np.diff(indices.cu_seqlens_q).tolist(), np.diff(indices.cu_seqlens_k).tolist())
        )
    return parts


def predicted_ms(latency: LatencyModel, segments: Segments) -> float:
    """Forward and backward of one rank by the device profile."""
    queries, keys = (np.array(part, dtype=np.int64) for part in segments)
    passes = (latency.attention_ns(queries, keys, backward=backward) for backward in (False, True))
    return sum(passes) / 1e6


def figure_15(
    attention: VarlenAttention,
    profile: Profile,
    every: list[list[int]],
    ranks: int,
    most_keys: int,
) -> dict[str, Any]:
    """Mean over sequences of the slowest rank's milliseconds, for each sharding."""
    latency = LatencyModel(profile, LLAMA2_7B_LAYER, Mesh(context=ranks))
    times: dict[str, list[float]] = {
        name: []
        for name in (*SHARDINGS, HEADS, "paper's choice", "optimal of the paper's", "our choice")
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
            measured = [attention_ms(attention, part) if part[0] else 0.0 for part in parts]
            slowest[name] = max(measured)
            cost[name] = predicted_latency(made, latency.segment_cost)
            errors.append(max(predicted_ms(latency, part) for part in parts) / max(measured) - 1)
        for name, ms in slowest.items():
            times[name].append(ms)
        times[HEADS].append(attention_ms(attention, (lengths, lengths), ranks=ranks))
        times["paper's choice"].append(slowest[min(PAPER, key=cost.__getitem__)])
        times["optimal of the paper's"].append(min(slowest[name] for name in PAPER))
        ours, _ = choose(lengths, ranks, 1, latency.segment_cost)
        if ours in slowest:
            times["our choice"].append(slowest[ours])
    # A mean over fewer sequences than the others' would not compare.
    means = {name: float(np.mean(each)) for name, each in times.items() if len(each) == len(every)}
    best = min(means[name] for name in SHARDINGS if name in means)
    return {
        "ms": means,
        "ours_over_best_single": means["our choice"] / best if "our choice" in means else None,
        "predicted_error": [float(x) for x in np.percentile(errors, [5, 50, 95])],
    }


def path_over_library(attention: VarlenAttention, lengths: list[int], ranks: int) -> float:
    """Time of our call over that of the library's own function, on one rank's segments."""
    segments = rank_segments(layout("hybrid", lengths, ranks, 1))[0]
    shape = LLAMA2_7B_LAYER
    leaves, gradient, metadata = inputs(segments, shape.heads, shape.kv_heads)
    bounds = metadata.cu_seqlens_q, metadata.cu_seqlens_k
    most = metadata.max_seqlen_q, metadata.max_seqlen_k

    def direct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if library is None:
            out = varlen_attn(q, k, v, *bounds, *most, window_size=(-1, 0))
        else:
            out = library(
                q,
                k,
                v,
                cu_seqlens_q=bounds[0],
                cu_seqlens_k=bounds[1],
                max_seqlen_q=most[0],
                max_seqlen_k=most[1],
                causal=True,
            )
        return out[0] if isinstance(out, tuple) else out

    ours_is_torchs = attention.kernel_name(DEVICE).startswith("torch")
    library = None if ours_is_torchs else flash_library()[0]
    ours = kernel_ms(lambda q, k, v: attention(q, k, v, metadata), leaves, gradient)
    return ours / kernel_ms(direct, leaves, gradient)


def show(result: dict[str, Any], console: Console) -> None:
    """Both figures as tables."""
    title = f"Segments of {result['keys']} keys, forward, measured: {result['device']}"
    rows = [
        [
            str(row["queries"]),
            str(row["segments"]),
            f"{row['forward_us_per_segment']:.1f}",
            f"{row['forward_tflops']:.0f}",
        ]
        for row in result["segments"]
    ]
    headings = ["queries", "segments", "us per segment", "TFLOP/s"]
    console.print(report.table(title, headings, rows))
    names = list(dict.fromkeys(name for row in result["shardings"] for name in row["ms"]))
    rows = []
    for row in result["shardings"]:
        low, _, high = row["predicted_error"]
        over = row["ours_over_best_single"]
        rows.append(
            [
                f"{row['window'] // 1024}K",
                str(row["ranks"]),
                *(f"{row['ms'][name]:.2f}" if name in row["ms"] else "-" for name in names),
                "-" if over is None else f"{over:.3f}",
                f"{low:+.0%} to {high:+.0%}",
            ]
        )
    headings = ["window", "CP", *names, "ours / best single", "predicted - measured, 5-95 %"]
    title = "Slowest rank, forward + backward of one layer, ms, measured"
    console.print(report.table(title, headings, rows))
    ratios = ", ".join(f"{ratio:.3f}" for ratio in result["path_over_library"])
    console.print(f"Our call over the library's own, one rank of each window: {ratios}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Both figures as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    queries = [row["queries"] for row in result["segments"]]
    left.plot(queries, [row["forward_tflops"] for row in result["segments"]], "o-")
    left.set_xscale("log", base=2)
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


def run(arguments: argparse.Namespace, profile: Profile) -> dict[str, Any]:
    """Every measurement."""
    attention = VarlenAttention(arguments.backend)
    every = {
        window: sequences(window, arguments.sequences, arguments.seed)
        for window in arguments.windows
    }
    return {
        "benchmark": "context_parallel_gpu",
        "measured": True,
        "device": profile.device,
        "torch": torch.__version__,
        "kernel": attention.kernel_name(DEVICE),
        "sequences": arguments.sequences,
        "keys": arguments.keys,
        "profile_errors": dict(profile.errors),
        "segments": figure_10(attention, arguments.tokens, arguments.keys),
        "shardings": [
            {
                "window": window,
                "ranks": ranks,
                **figure_15(attention, profile, every[window], ranks, arguments.most_keys),
            }
            for window in arguments.windows
            for ranks in arguments.ranks
        ],
        "path_over_library": [
            path_over_library(attention, every[window][0], arguments.ranks[-1])
            for window in arguments.windows
        ],
    }


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = report.parser("context_parallel_gpu", __doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[65_536, 131_072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--sequences", type=int, default=8, help="per window (default 8)")
    parser.add_argument("--keys", type=int, default=8192, help="of Figure 10's segments")
    parser.add_argument("--tokens", type=int, default=16_384, help="of Figure 10's calls")
    parser.add_argument("--most-keys", type=int, default=1 << 20, help="default 1048576")
    parser.add_argument("--seed", type=int, default=0, help="of Generator A (default 0)")
    parser.add_argument("--backend", default="auto", help="torch, flash or auto (default)")
    parser.add_argument("--profile", help="of this device; measured first where none is given")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results"),
        help="folder for the JSON, the picture and the profile",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parsed(argv)
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark measures kernels on a CUDA device, and there is none.")
    console = Console(width=180)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.profile:
        profile = Profile.load(arguments.profile)
    else:
        profile = measure(
            TransformerConfig.preset("7b"),
            name="measured",
            device=torch.device(DEVICE),
            dtype=DTYPE,
            links=False,
            report=lambda text: console.print(f"Profile: {text}", highlight=False),
        )
        (arguments.output / "measured_profile.json").write_text(profile.to_json())
    result = run(arguments, profile)
    show(result, console)
    saved = arguments.output / "context_parallel_gpu"
    draw(result, saved.with_suffix(".png"))
    report.finish(result, saved)


if __name__ == "__main__":
    main()
