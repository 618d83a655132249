"""The measurements behind a profile: kernels, layers, ends, and how well a prediction fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.varlen import VarlenAttention
from lightning_wlb.cost.flops import causal_pairs, head_flops, layer_linear_flops
from lightning_wlb.cost.latency import DTYPE_BYTES, LatencyModel
from lightning_wlb.cost.profile import ActionOverhead, AttentionTable, LinearTable, Profile
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Slice
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.sharding import layout, rank_indices
from lightning_wlb.strategy.measure import make_stopwatch

SHORT_PIECE = 32
"""Tokens of the pieces that layers are measured on, so that attention hardly counts."""


@dataclass(frozen=True)
class Grid:
    """Where to measure; a coarser grid for tests, a finer one for patience.

    Args:
        queries: of attention segments.
        keys_per_query: of attention segments.
        pairs: most query-key pairs of a segment; points beyond repeat the rate of the last.
        rows: of layers and ends.
        repeats: of every measurement, of which the median counts.
        held_out: micro-batches that the finished profile is judged by.
    """

    queries: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
    keys_per_query: tuple[float, ...] = (1.0, 1.125, 1.5, 2.0, 4.0, 16.0, 128.0)
    pairs: int = 2**23
    rows: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    repeats: int = 5
    held_out: int = 12


CPU_GRID = Grid()
CUDA_GRID = Grid(
    queries=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    keys_per_query=(1.0, 2.0, 4.0, 16.0, 64.0, 512.0),
    pairs=2**33,
    rows=(128, 512, 2048, 8192, 32768, 65536),
    repeats=10,
)


@dataclass
class Stages:
    """Seconds of (forward, backward) at each number of rows, attention left out."""

    layer: list[tuple[float, float]]
    head: list[tuple[float, float]]
    overhead: ActionOverhead


class Bench:
    """The measurements of one device, dtype and shape of layers."""

    def __init__(
        self, config: TransformerConfig, device: torch.device, dtype: torch.dtype, grid: Grid
    ) -> None:
        self.config, self.device, self.dtype, self.grid = config, device, dtype, grid

    def attention(self) -> AttentionTable:
        """The kernel's table, with this device's tile and call overhead."""
        # A CPU takes queries as they come; tiled GPU kernels round up to 128.
        tile = 128 if self.device.type == "cuda" else 1
        shape = self.config.shape
        tables: list[list[list[float]]] = [[], []]
        call = self._call_overhead()
        for queries in self.grid.queries:
            rates: list[list[float]] = [[], []]
            for ratio in self.grid.keys_per_query:
                keys = round(queries * ratio)
                if queries * keys > self.grid.pairs and rates[0]:
                    for known in rates:
                        known.append(known[-1])
                    continue
                count = self._segments(queries, keys)
                times = self._kernel_seconds([(queries, keys)] * count)
                flops = 4 * shape.heads * shape.head_dim * causal_pairs(queries, keys - queries)
                for passed, factor in enumerate((1.0, 2.5)):
                    seconds = max(times[passed] - call[passed], 0.2 * times[passed]) / count
                    rates[passed].append(float(f"{factor * flops / seconds:.4g}"))
            for table, row in zip(tables, rates, strict=True):
                table.append(row)
        return AttentionTable(
            head_dim=shape.head_dim,
            tile=tile,
            queries=self.grid.queries,
            keys_per_query=self.grid.keys_per_query,
            forward=tuple(map(tuple, tables[0])),
            backward=tuple(map(tuple, tables[1])),
            call_ns=(float(round(call[0] * 1e9)), float(round(call[1] * 1e9))),
        )

    def _segments(self, queries: int, keys: int) -> int:
        """Segments of a call: enough tokens to keep a GPU busy; a few on a CPU."""
        if self.device.type == "cuda":
            return max(1, min(16384 // queries, 2**24 // keys))
        return max(1, min(16, 4096 // queries, 2**19 // keys))

    def _call_overhead(self) -> tuple[float, float]:
        """What a call takes besides its segments: two smallest points, extrapolated to none."""
        few, many = (self._kernel_seconds([(1, 1)] * count) for count in (4, 20))
        forward, backward = (
            max(less - 4 * (more - less) / 16, 0.0) for less, more in zip(few, many, strict=True)
        )
        return forward, backward

    def _kernel_seconds(self, segments: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Forward and backward of one call over segments of (queries, keys)."""
        shape = self.config.shape
        total_q, total_k = (sum(segment[side] for segment in segments) for side in (0, 1))
        q = self._random(total_q, shape.heads, shape.head_dim)
        k, v = (self._random(total_k, shape.kv_heads, shape.head_dim) for _ in range(2))
        metadata = self._metadata(segments, total_q, total_k)
        kernel = VarlenAttention()
        gradient = torch.randn_like(q)

        def forward() -> Tensor:
            return kernel(q, k, v, metadata)

        def backward(out: Tensor) -> None:
            torch.autograd.grad(out, (q, k, v), gradient)

        return self._timed(forward, backward)

    def _metadata(
        self, segments: Sequence[tuple[int, int]], queries: int, keys: int
    ) -> AttentionMetadata:
        lengths = np.array(segments, dtype=np.int64)
        ends = [np.concatenate(([0], np.cumsum(lengths[:, side]))) for side in (0, 1)]
        whole = rank_indices(layout("per_sequence", [queries], 1, 1), 0)
        return replace(
            AttentionMetadata.from_indices(whole, queries, 1),
            cu_seqlens_q=torch.from_numpy(ends[0].astype(np.int32)),
            cu_seqlens_k=torch.from_numpy(ends[1].astype(np.int32)),
            max_seqlen_q=int(lengths[:, 0].max()),
            max_seqlen_k=int(lengths[:, 1].max()),
            # Keys of their own, not the local rows.
            key_index=torch.arange(keys),
        ).to(self.device)

    def stages(self) -> Stages:
        """Layers, head and overhead over the grid of rows."""
        layers, heads, overheads = [], [], []
        one, three = (self._stage(layers=count) for count in (1, 3))
        last = self._stage(layers=0, head=True)
        for rows in self.grid.rows:
            pieces = _short_pieces(rows)
            single, triple = (self._linear_seconds(model, pieces) for model in (one, three))
            layer = tuple(
                max((more - less) / 2, 0.1 * less)
                for less, more in zip(single, triple, strict=True)
            )
            overhead = tuple(
                max(less - part, 0.0) for less, part in zip(single, layer, strict=True)
            )
            head = tuple(
                max(whole - part, 0.1 * whole)
                for whole, part in zip(self._linear_seconds(last, pieces), overhead, strict=True)
            )
            layers.append((layer[0], layer[1]))
            overheads.append((overhead[0], overhead[1]))
            heads.append((head[0], head[1]))
        fits = [affine(self.grid.rows, [each[passed] for each in overheads]) for passed in (0, 1)]
        return Stages(
            layers,
            heads,
            ActionOverhead(
                ns=(fits[0][0], fits[1][0]),
                row_ns=(fits[0][1], fits[1][1]),
            ),
        )

    def element_bytes_per_second(self, stages: Stages) -> float:
        """Traffic of SwiGLU's gate on large tensors, as the latency model counts it.

        At least what leaves matrix products three quarters of every layer's time.
        """
        rows = self.grid.rows[-1]
        width = DTYPE_BYTES[str(self.dtype).removeprefix("torch.")]
        a, b = (self._random(rows, self.config.ffn_dim) for _ in range(2))
        forward, _ = self._timed(lambda: F.silu(a) * b, lambda out: None)
        measured = 5 * width * rows * self.config.ffn_dim / forward
        probe = self._probe_model(1.0)
        least = []
        for rows, layer, head in zip(self.grid.rows, stages.layer, stages.head, strict=True):
            for passed in (0, 1):
                # At one byte per second, a time is its traffic.
                least += [
                    probe.layer_traffic(rows, backward=bool(passed)) / (0.75 * layer[passed]),
                    probe.head_traffic(rows, backward=bool(passed)) / (0.75 * head[passed]),
                ]
        return float(f"{max(measured, *least):.4g}")

    def tables(self, stages: Stages, bandwidth: float) -> tuple[LinearTable, LinearTable]:
        """Rates of matrix products: FLOPs over what element-wise traffic leaves of the time."""
        probe, shape = self._probe_model(bandwidth), self.config.shape
        made = []
        for times, flops, traffic, factors in (
            (stages.layer, layer_linear_flops, probe.layer_traffic, (1, 2)),
            (stages.head, head_flops, probe.head_traffic, (1, 3)),
        ):
            rates: list[list[float]] = [[], []]
            for rows, pair in zip(self.grid.rows, times, strict=True):
                for passed in (0, 1):
                    rest = pair[passed] - traffic(rows, backward=bool(passed)) / bandwidth
                    rates[passed].append(
                        float(f"{factors[passed] * flops(shape, rows) / rest:.4g}")
                    )
            made.append(LinearTable(self.grid.rows, tuple(rates[0]), tuple(rates[1])))
        return made[0], made[1]

    def _probe_model(self, bandwidth: float) -> LatencyModel:
        """The latency model of the shape that is measured, for its traffic alone."""
        profile = replace(
            Profile.load("h100"),
            dtype=str(self.dtype).removeprefix("torch."),
            element_bytes_per_second=bandwidth,
        )
        return LatencyModel(profile, self.config.shape)

    def best_product(self) -> float:
        """FLOP/s of a large matrix product, where there is no data sheet."""
        size = 1024
        a, b = (self._random(size, size) for _ in range(2))
        forward, _ = self._timed(lambda: a @ b, lambda out: None)
        return float(f"{2 * size**3 / forward:.4g}")

    def errors(self, profile: Profile) -> dict[str, float]:
        """Relative errors of predicted stages on micro-batches that no grid has seen."""
        generator = np.random.default_rng(1)
        config = replace(self.config, layers=2)
        model = self._stage(layers=2, embed=True, head=True)
        predictor = Predictor(LatencyModel(profile, config.shape), (range(2),))
        found = []
        for _ in range(self.grid.held_out):
            budget = int(generator.integers(self.grid.rows[0], self.grid.rows[-1]))
            lengths: list[int] = []
            while sum(lengths) < budget:
                length = int(np.exp(generator.normal(5.5, 1.5)))
                lengths.append(max(1, min(length, budget - sum(lengths))))
            cost = predictor.micro_batch([Slice(i, 0, 0, n) for i, n in enumerate(lengths)], "ptrr")
            predicted = sum(predictor.action_ns(0, cost)) / 1e9
            measured = sum(whole for whole, _ in self._stage_seconds(model, lengths))
            found.append(abs(predicted / measured - 1))
        return {
            "micro_batches": float(self.grid.held_out),
            "median": float(f"{median(found):.3g}"),
            "worst": float(f"{max(found):.3g}"),
        }

    def _stage(self, *, layers: int, embed: bool = False, head: bool = False) -> Transformer:
        config = replace(self.config, layers=max(layers, 1))
        model = Transformer(config, layers=range(layers), embed=embed, head=head)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return model.to(device=self.device, dtype=self.dtype)

    def _linear_seconds(self, model: Transformer, pieces: Sequence[int]) -> tuple[float, float]:
        forward, backward = self._stage_seconds(model, pieces)
        return forward[0] - forward[1], backward[0] - backward[1]

    def _stage_seconds(
        self, model: Transformer, lengths: Sequence[int]
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """(whole, attention) of forward and of backward, medians."""
        placed = layout("per_sequence", lengths, 1, 1)
        indices, rows = rank_indices(placed, 0), placed.rows
        words = torch.randint(model.config.vocab_size, (rows,))
        batch = MicroBatchTensors(
            tokens=words,
            labels=words,
            positions=torch.from_numpy(indices.offset),
            attention=AttentionMetadata.from_indices(indices, rows, 1),
            rows=rows,
        ).to(self.device)
        hidden = None if model.embed is not None else self._random(rows, model.config.dim)
        stopwatch = make_stopwatch(self.device)
        model.attention_kernel.timer = stopwatch
        samples = []
        for repeat in range(self.grid.repeats + 1):
            stopwatch.begin_step()
            with stopwatch.action(Action(0, FORWARD, 0)):
                out = model(batch, hidden)
            gradient = torch.ones_like(out)
            with stopwatch.action(Action(0, BACKWARD, 0)):
                torch.autograd.backward(out, gradient)
            timings = stopwatch.timings()
            if repeat:  # the first warms up
                samples.append([(each.compute, each.attention) for each in timings])
        table = np.median(np.array(samples), axis=0)
        return tuple(table[0].tolist()), tuple(table[1].tolist())

    def _timed(
        self, forward: Callable[[], Any], backward: Callable[[Any], None]
    ) -> tuple[float, float]:
        """Median seconds of each; short calls are repeated within a sample."""
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

        def run(action: Callable[[], Any]) -> tuple[float, Any]:
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                result = action()
                end.record()
                end.synchronize()
                return begin.elapsed_time(end) / 1000, result
            start = clock()
            result = action()
            return clock() - start, result

        samples: list[tuple[float, float]] = []
        spent = 0.0
        while not self._enough(len(samples) - 1, spent):
            there, out = run(forward)
            back, _ = run(partial(backward, out))
            samples.append((there, back))
            spent += there + back
        table = np.median(np.array(samples[1:]), axis=0)
        return float(table[0]), float(table[1])

    def _enough(self, samples: int, seconds: float) -> bool:
        """As many as asked for; more of short ones, fewer of long ones."""
        if seconds > 0.5:
            return samples >= min(3, self.grid.repeats)
        return samples >= self.grid.repeats and (seconds > 0.01 or samples >= 20)

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype).requires_grad_()


def _short_pieces(rows: int) -> list[int]:
    whole, rest = divmod(rows, SHORT_PIECE)
    return [SHORT_PIECE] * whole + [rest] * bool(rest)


def affine(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Nanoseconds at x = 0 and per x, from seconds; neither below 0.

    Relative errors count, so that the small values decide about the constant.
    """
    points, seconds = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    slope, constant = np.polyfit(points, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
    if constant < 0:
        slope, constant = np.mean(seconds / points), 0.0
    return float(round(max(constant, 0.0) * 1e9)), float(f"{max(slope, 0.0) * 1e9:.4g}")
