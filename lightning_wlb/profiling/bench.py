"""The measurements behind a profile: kernel, layers, head, and how well a prediction fits.

Arrays of two are (forward, backward) throughout. Times are medians of repeated calls, the first of
which warms up and does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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
from lightning_wlb.profiling.stopwatch import make_stopwatch
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.sharding import layout, rank_indices

SHORT_DOCUMENT = 32
"""Tokens of the documents that layers are measured on, so that attention hardly counts."""


@dataclass(frozen=True)
class Grid:
    """Where to measure; a coarser grid for tests, a finer one for patience.

    Args:
        queries: of attention segments.
        keys_per_query: of attention segments.
        pairs: most query-key pairs of a segment; points beyond repeat the rate of the last.
        rows: of layers and of the head.
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


class Stages(NamedTuple):
    """Seconds [numbers of rows, 2], attention left out."""

    layer: np.ndarray
    head: np.ndarray
    overhead: ActionOverhead


class Bench:
    """The measurements of one device, dtype and shape of layers."""

    def __init__(
        self, config: TransformerConfig, device: torch.device, dtype: torch.dtype, grid: Grid
    ) -> None:
        self.config, self.device, self.dtype, self.grid = config, device, dtype, grid
        # The latency model is asked for the traffic of a layer alone, so any profile's rates do.
        profile = replace(Profile.load("h100"), dtype=str(dtype).removeprefix("torch."))
        self._latency = LatencyModel(profile, config.shape)

    def attention(self) -> AttentionTable:
        """The kernel's table, with this device's tile and call overhead."""
        shape, queries_axis, ratios = self.config.shape, self.grid.queries, self.grid.keys_per_query
        rates = np.zeros((2, len(queries_axis), len(ratios)))  # of forward and of backward
        call = self._call_overhead()
        for row, queries in enumerate(queries_axis):
            for column, ratio in enumerate(ratios):
                keys = round(queries * ratio)
                if queries * keys > self.grid.pairs and column:
                    rates[:, row, column] = rates[:, row, column - 1]
                    continue
                count = self._segments(queries, keys)
                times = self._kernel_seconds([(queries, keys)] * count)
                flops = 4 * shape.heads * shape.head_dim * causal_pairs(queries, keys - queries)
                seconds = np.maximum(times - call, 0.2 * times) / count
                rates[:, row, column] = np.array((1.0, 2.5)) * flops / seconds
        forward, backward = (tuple(map(_rounded, table)) for table in rates)
        return AttentionTable(
            head_dim=shape.head_dim,
            # A CPU takes queries as they come; tiled GPU kernels round up to 128.
            tile=128 if self.device.type == "cuda" else 1,
            queries=queries_axis,
            keys_per_query=ratios,
            forward=forward,
            backward=backward,
            call_ns=(float(round(call[0] * 1e9)), float(round(call[1] * 1e9))),
        )

    def _segments(self, queries: int, keys: int) -> int:
        """Segments of a call: enough tokens to keep a GPU busy; a few on a CPU."""
        if self.device.type == "cuda":
            return max(1, min(16384 // queries, 2**24 // keys))
        return max(1, min(16, 4096 // queries, 2**19 // keys))

    def _call_overhead(self) -> np.ndarray:
        """Seconds [2] of a call besides its segments: two smallest points, extrapolated to none."""
        few, many = (self._kernel_seconds([(1, 1)] * count) for count in (4, 20))
        return np.maximum(few - 4 * (many - few) / 16, 0.0)

    def _kernel_seconds(self, segments: Sequence[tuple[int, int]]) -> np.ndarray:
        """Seconds [2] of one call over segments of (queries, keys)."""
        shape = self.config.shape
        total_q, total_k = (sum(segment[side] for segment in segments) for side in (0, 1))
        q = self._random(total_q, shape.heads, shape.head_dim)
        k, v = (self._random(total_k, shape.kv_heads, shape.head_dim) for _ in range(2))
        lengths = np.array(segments)
        firsts = np.concatenate((np.zeros((1, 2)), np.cumsum(lengths, axis=0))).astype(np.int32)
        metadata = AttentionMetadata(
            rows=total_q,
            queries=total_q,
            cu_seqlens_q=torch.from_numpy(firsts[:, 0].copy()),
            cu_seqlens_k=torch.from_numpy(firsts[:, 1].copy()),
            max_seqlen_q=int(lengths[:, 0].max()),
            max_seqlen_k=int(lengths[:, 1].max()),
            key_index=torch.arange(total_k),  # keys of their own, not the local rows
        ).to(self.device)
        kernel = VarlenAttention()
        gradient = torch.randn_like(q)

        def forward() -> Tensor:
            return kernel(q, k, v, metadata)

        def backward(out: Tensor) -> None:
            torch.autograd.grad(out, (q, k, v), gradient)

        return self._timed(forward, backward)

    def stages(self) -> Stages:
        """Layers, head and overhead over the grid of rows."""
        one, three = (self._stage(layers=count) for count in (1, 3))
        last = self._stage(layers=0, head=True)
        seconds = np.array(
            [
                [
                    self._linear_seconds(model, _short_documents(rows))
                    for model in (one, three, last)
                ]
                for rows in self.grid.rows
            ]
        )
        single, triple, end = seconds.swapaxes(0, 1)
        layer = np.maximum((triple - single) / 2, 0.1 * single)
        overhead = np.maximum(single - layer, 0.0)
        head = np.maximum(end - overhead, 0.1 * end)
        forward, backward = (affine(self.grid.rows, part) for part in overhead.T)
        fit = ActionOverhead(ns=(forward[0], backward[0]), row_ns=(forward[1], backward[1]))
        return Stages(layer, head, fit)

    def element_bytes_per_second(self, stages: Stages) -> float:
        """Traffic of SwiGLU's gate on large tensors, as the latency model counts it.

        At least what leaves matrix products three quarters of every layer's time.
        """
        rows = self.grid.rows[-1]
        width = DTYPE_BYTES[str(self.dtype).removeprefix("torch.")]
        a, b = (self._random(rows, self.config.ffn_dim) for _ in range(2))
        forward, _ = self._timed(lambda: F.silu(a) * b, lambda out: None)
        measured = 5 * width * rows * self.config.ffn_dim / forward
        layer = self._traffic(self._latency.layer_traffic) / (0.75 * stages.layer)
        head = self._traffic(self._latency.head_traffic) / (0.75 * stages.head)
        return _rounded([max(measured, layer.max(), head.max())])[0]

    def tables(self, stages: Stages, bandwidth: float) -> tuple[LinearTable, LinearTable]:
        """Rates of matrix products: FLOPs over what element-wise traffic leaves of the time."""
        shape = self.config.shape
        layer_flops = partial(layer_linear_flops, shape.each_layer[0])
        made = []
        for seconds, flops, traffic, factors in (
            (stages.layer, layer_flops, self._latency.layer_traffic, (1, 2)),
            (stages.head, partial(head_flops, shape), self._latency.head_traffic, (1, 3)),
        ):
            products = np.array([flops(rows) for rows in self.grid.rows])
            rest = seconds - self._traffic(traffic) / bandwidth
            forward, backward = map(_rounded, np.array(factors)[:, None] * products / rest.T)
            made.append(LinearTable(self.grid.rows, forward, backward))
        return made[0], made[1]

    def _traffic(self, traffic: Callable[..., int]) -> np.ndarray:
        """Bytes of element-wise work [numbers of rows, 2]."""
        passes = (False, True)
        return np.array(
            [[traffic(rows, backward=backward) for backward in passes] for rows in self.grid.rows]
        )

    def best_product(self) -> float:
        """FLOP/s of a large matrix product, where there is no data sheet."""
        size = 1024
        a, b = (self._random(size, size) for _ in range(2))
        forward, _ = self._timed(lambda: a @ b, lambda out: None)
        return _rounded([2 * size**3 / forward])[0]

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
            measured = self._stage_seconds(model, lengths)[:, 0].sum()
            found.append(abs(predicted / measured - 1))
        return {
            "micro_batches": float(self.grid.held_out),
            "median": float(f"{np.median(found):.3g}"),
            "worst": float(f"{max(found):.3g}"),
        }

    def _stage(self, *, layers: int, embed: bool = False, head: bool = False) -> Transformer:
        config = replace(self.config, layers=max(layers, 1))
        model = Transformer(config, layers=range(layers), embed=embed, head=head)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return model.to(device=self.device, dtype=self.dtype)

    def _linear_seconds(self, model: Transformer, lengths: Sequence[int]) -> np.ndarray:
        """Seconds [2] of a micro-batch without attention."""
        whole, attention = self._stage_seconds(model, lengths).T
        return np.asarray(whole - attention)

    def _stage_seconds(self, model: Transformer, lengths: Sequence[int]) -> np.ndarray:
        """Seconds [2, 2 (whole, attention)] of a micro-batch."""
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
        for _ in range(self.grid.repeats + 1):
            stopwatch.begin_step()
            with stopwatch.action(Action(0, FORWARD, 0)):
                out = model(batch, hidden)
            gradient = torch.ones_like(out)
            with stopwatch.action(Action(0, BACKWARD, 0)):
                torch.autograd.backward(out, gradient)
            samples.append([(each.compute, each.attention) for each in stopwatch.timings()])
        return np.asarray(np.median(np.array(samples[1:]), axis=0))

    def _timed(self, forward: Callable[[], Any], backward: Callable[[Any], None]) -> np.ndarray:
        """Median seconds [2] of each; short calls are sampled more often."""
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
        while not self._enough(len(samples) - 1, sum(map(sum, samples))):
            there, out = run(forward)
            back, _ = run(partial(backward, out))
            samples.append((there, back))
        return np.asarray(np.median(np.array(samples[1:]), axis=0))

    def _enough(self, samples: int, seconds: float) -> bool:
        """As many as asked for; more of short ones, fewer of long ones."""
        if seconds > 0.5:
            return samples >= min(3, self.grid.repeats)
        return samples >= self.grid.repeats and (seconds > 0.01 or samples >= 20)

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype).requires_grad_()


def _short_documents(rows: int) -> list[int]:
    whole, rest = divmod(rows, SHORT_DOCUMENT)
    return [SHORT_DOCUMENT] * whole + [rest] * bool(rest)


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    """Four digits of each, which is more than a measurement has."""
    return tuple(float(f"{value:.4g}") for value in values)


def affine(x: Sequence[float], y: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Nanoseconds at x = 0 and per x, from seconds; neither below 0.

    Relative errors count, so that the small values decide about the constant.
    """
    points, seconds = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    slope, constant = np.polyfit(points, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
    if constant < 0:
        slope, constant = np.mean(seconds / points), 0.0
    return float(round(max(constant, 0.0) * 1e9)), float(f"{max(slope, 0.0) * 1e9:.4g}")
