"""The measurements behind a profile: kernel, layers, head, and how well predictions fit.

Arrays of two are (forward, backward). Times are medians of repeated calls after one to warm up.

*Kernel*: the device's own time, without the host's (:mod:`.call_timer`), since in a long step the
host queues kernels while earlier ones run. *Stages*: the longer of the device's own time and the
host's, since an action of few rows takes as long as the host needs to queue it, however fast the
device is. The device's time for attention inside a stage is subtracted.

Points that do not fit into memory are not measured (:mod:`.measured_points`). A point of the kernel
then gets the better rate of two neighbours, with fewer keys for each query and with fewer queries.
Layers are measured up to the largest number of rows that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.cost.flops import causal_pairs, head_flops, layer_linear_flops
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.cost.profile import ActionOverhead, Profile
from lightning_wlb.cost.rates import AttentionTable, LinearTable
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Slice
from lightning_wlb.planning.global_batches import StreamPosition, next_pieces
from lightning_wlb.planning.synthetic_lengths import generator_a
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.profiling.action_stopwatch import Stopwatch
from lightning_wlb.profiling.call_timer import CallTimer
from lightning_wlb.profiling.device import free_bytes
from lightning_wlb.profiling.measured_points import Grid, segments
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.sharding import layout, rank_indices

SHORT_DOCUMENT = 32
"""Tokens of the documents on which layers are measured: few, so that attention hardly counts."""


class StageTimes(NamedTuple):
    """Times of a stage without attention."""

    layer: np.ndarray  #: seconds of a layer, [numbers of rows, 2]
    head: np.ndarray  #: seconds of the head, [numbers of rows, 2]
    overhead: ActionOverhead


class DeviceBench:
    """Measures the kernel and the layers of one shape and dtype on one device.

    Attributes:
        rows: the grid's numbers of rows with which layers fit into memory.

    Raises:
        ValueError: layers do not fit into memory even with the fewest rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device,
        dtype: torch.dtype,
        grid: Grid,
        backend: str = "auto",
    ) -> None:
        self.config, self.device, self.dtype, self.grid = config, device, dtype, grid
        self.backend = backend
        self._timer = CallTimer(device)
        self._free = free_bytes(device)
        self.rows = tuple(
            rows for rows in grid.rows if self._stage_bytes(rows) < 3 * self._free // 4
        )
        if not self.rows:
            raise ValueError(
                f"no memory on {device} for three layers of dim {config.dim} and feed-forward"
                f" {config.ffn_dim} with {grid.rows[0]} rows: of {self._free / 1e9:.1f} GB, layers"
                " may take three quarters. Measure layers split over ranks: fewer heads and a"
                " narrower feed-forward."
            )
        # Only the latency model's traffic of a layer is used, so any profile's rates will do.
        profile = replace(Profile.load("h100"), dtype=str(dtype).removeprefix("torch."))
        self._latency = LatencyModel(profile, config.shape)

    def attention(self) -> AttentionTable:
        """Rates of the attention kernel, with this device's tile and call overhead."""
        shape, queries_axis, ratios = self.config.shape, self.grid.queries, self.grid.keys_per_query
        rates = np.zeros((2, len(queries_axis), len(ratios)))  # of forward and of backward
        call = self._call_overhead()
        for row, queries in enumerate(queries_axis):
            for column, ratio in enumerate(ratios):
                rate = self._rate(queries, round(queries * ratio), call)
                if rate is None and row == column == 0:
                    raise ValueError(
                        f"no memory for attention over {queries} queries of {shape.heads} heads of"
                        f" {shape.head_dim}, the smallest point. Free memory on {self.device}."
                    )
                if rate is None:
                    rate = _neighbouring(rates, row, column)
                rates[:, row, column] = rate
        forward, backward = (tuple(map(_rounded, table)) for table in rates)
        return AttentionTable(
            head_dim=shape.head_dim,
            # The CPU kernel does not round queries up; tiled GPU kernels round up to 128.
            tile=128 if self.device.type == "cuda" else 1,
            queries=queries_axis,
            keys_per_query=ratios,
            forward=forward,
            backward=backward,
            call_ns=(float(round(call[0] * 1e9)), float(round(call[1] * 1e9))),
        )

    def _rate(self, queries: int, keys: int, call: np.ndarray) -> np.ndarray | None:
        """FLOP/s [2] of a point's segments; None if the point is left out."""
        shape, width = self.config.shape, self.dtype.itemsize
        cuda, budget = self.device.type == "cuda", self._free // 8
        count = segments(self.grid, shape, width, queries, keys, cuda=cuda, budget=budget)
        if count == 0:
            return None
        times = self._kernel_seconds([(queries, keys)] * count)
        flops = 4 * shape.heads * shape.head_dim * causal_pairs(queries, keys - queries)
        seconds = np.maximum(times - call, 0.2 * times) / count
        return np.asarray(np.array((1.0, 2.5)) * flops / seconds)

    def _call_overhead(self) -> np.ndarray:
        """Seconds [2] of a call besides its segments, extrapolated from the two smallest points."""
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
            key_index=torch.arange(total_k),  # the keys are not the local rows
        ).to(self.device)
        kernel = VarlenAttention(self.backend)
        gradient = torch.randn_like(q)

        def forward() -> Tensor:
            return kernel(q, k, v, metadata)

        def backward(out: Tensor) -> None:
            torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

        return self._timer.medians(forward, backward, self.grid.repeats)

    def stages(self) -> StageTimes:
        """Times of layers, head and overhead over the grid of rows."""
        one, three = (self._stage(layers=count) for count in (1, 3))
        models = one, three, self._stage(layers=0, head=True)
        batches = map(_short_documents, self.rows)
        measured = [[self._stage_seconds(model, each) for model in models] for each in batches]
        whole, attention = np.moveaxis(np.array(measured), -1, 0)
        single, triple, end = (whole - attention).swapaxes(0, 1)
        layer = np.maximum((triple - single) / 2, 0.1 * single)
        overhead = np.maximum(single - layer, 0.0)
        head = np.maximum(end - overhead, 0.1 * end)
        forward, backward = (affine(self.rows, part) for part in overhead.T)
        fit = ActionOverhead(ns=(forward[0], backward[0]), row_ns=(forward[1], backward[1]))
        return StageTimes(layer, head, fit)

    def element_bytes_per_second(self, stages: StageTimes) -> float:
        """The memory's bandwidth, by the traffic that the latency model counts for SwiGLU's gate.

        It is raised until element-wise work takes at most a quarter of a layer's or head's time.
        """
        rows = self.rows[-1]
        a, b = (self._random(rows, self.config.ffn_dim) for _ in range(2))
        forward = self._seconds(lambda: F.silu(a) * b)
        measured = 5 * self.dtype.itemsize * rows * self.config.ffn_dim / forward
        layer = self._traffic(self._latency.layer_traffic) / (0.75 * stages.layer)
        head = self._traffic(self._latency.head_traffic) / (0.75 * stages.head)
        return _rounded([max(measured, layer.max(), head.max())])[0]

    def tables(self, stages: StageTimes, bandwidth: float) -> tuple[LinearTable, LinearTable]:
        """Rates of matrix products in layers and head: FLOPs over the time without traffic."""
        shape = self.config.shape
        layer_flops = partial(layer_linear_flops, shape.each_layer[0])
        made = []
        for seconds, flops, traffic, factors in (
            (stages.layer, layer_flops, self._latency.layer_traffic, (1, 2)),
            (stages.head, partial(head_flops, shape), self._latency.head_traffic, (1, 3)),
        ):
            products = np.array([flops(rows) for rows in self.rows])
            rest = seconds - self._traffic(traffic) / bandwidth
            forward, backward = map(_rounded, np.array(factors)[:, None] * products / rest.T)
            made.append(LinearTable(self.rows, forward, backward))
        return made[0], made[1]

    def _traffic(self, traffic: Callable[..., int]) -> np.ndarray:
        """Bytes of element-wise work [numbers of rows, 2]."""
        passes = (False, True)
        return np.array(
            [[traffic(rows, backward=backward) for backward in passes] for rows in self.rows]
        )

    def best_product(self) -> float:
        """FLOP/s of a large matrix product, which is the peak if there is no data sheet."""
        size = 8192 if self.device.type == "cuda" else 1024
        a, b = (self._random(size, size) for _ in range(2))
        return _rounded([2 * size**3 / self._seconds(lambda: a @ b)])[0]

    def held_out(self) -> Iterator[list[int]]:
        """Yield the lengths of the documents of micro-batches like those of training.

        They are windows of Generator A, cut as ``original`` packing does. In turn, windows have as
        many tokens as the grid's most rows, half and a quarter of that.
        """
        most = self.rows[-1]
        # Documents have 32 tokens at least, so that these are enough.
        lengths = generator_a(self.grid.held_out * most // 32 + 1, most, seed=1)
        order, at = np.arange(len(lengths)), StreamPosition()
        for number in range(self.grid.held_out):
            window = most >> number % 3
            pieces, at = next_pieces(order, lengths, at, window, window, cuts_stream=True)
            yield [stop - start for _, start, stop in pieces]

    def errors(self, profile: Profile) -> dict[str, float]:
        """Relative errors of predicted stages on micro-batches that are not in the grid."""
        config = replace(self.config, layers=2)
        model = self._stage(layers=2, embed=True, head=True)
        predictor = Predictor(LatencyModel(profile, config.shape), (range(2),))
        found = []
        for lengths in self.held_out():
            seconds = self._stage_seconds(model, lengths)[:, 0].sum()
            slices = [Slice(i, 0, 0, length) for i, length in enumerate(lengths)]
            cost = predictor.micro_batch(slices, "ptrr")
            found.append(abs(sum(predictor.action_ns(0, cost)) / 1e9 / seconds - 1))
        return {
            "micro_batches": float(len(found)),
            "median": float(f"{np.median(found):.3g}"),
            "worst": float(f"{max(found):.3g}"),
        }

    def _stage(self, *, layers: int, embed: bool = False, head: bool = False) -> Transformer:
        config = replace(self.config, layers=max(layers, 1))
        with torch.device("meta"):  # a host takes seconds to draw a billion parameters
            model = Transformer(config, attention_backend=self.backend).to(self.dtype)
        model.embed, model.head = model.embed if embed else None, model.head if head else None
        if not layers:
            del model.layers["0"]
        model = model.to_empty(device=self.device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return model

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
        ).changed(lambda tensor: tensor.to(self.device))
        hidden = None if model.embed is not None else self._random(rows, model.config.dim)
        stopwatch = Stopwatch(self.device)
        model.attention_kernel.timer = stopwatch
        samples: list[list[tuple[float, float]]] = []
        while len(samples) <= self.grid.repeats:
            stopwatch.begin_step()
            with self._timer.held() as there, stopwatch.action(Action(0, FORWARD, 0)):
                out = model(batch, hidden)
            gradient = torch.ones_like(out)
            with self._timer.held() as back, stopwatch.action(Action(0, BACKWARD, 0)):
                torch.autograd.backward(out, gradient)
            timings = zip(stopwatch.timings(), (there, back), strict=True)
            sample = [(max(each.compute, held.seconds), each.attention) for each, held in timings]
            if there.ahead and back.ahead:
                samples.append(sample)
        return np.asarray(np.median(np.array(samples[1:]), axis=0))

    def _stage_bytes(self, rows: int) -> int:
        """Bytes that a micro-batch of so many rows takes on a stage of three layers."""
        dtype, cuda = str(self.dtype).removeprefix("torch."), self.device.type == "cuda"
        model = MemoryModel(self.config.shape, dtype=dtype, accelerator=cuda)
        parts = StageParts(layers=(3,))
        held = model.micro_batch_bytes(parts, rows) + model.transient_bytes(parts, rows, rows)
        return held + 2 * self.dtype.itemsize * model.parameters(parts)

    def _seconds(self, call: Callable[[], Tensor]) -> float:
        forward, _ = self._timer.medians(call, lambda out: None, self.grid.repeats)
        return float(forward)

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype).requires_grad_()


def _neighbouring(rates: np.ndarray, row: int, column: int) -> np.ndarray:
    """The better rate with fewer keys for each query and with fewer queries."""
    near = [rates[:, row, column - 1]] if column else []
    if row:
        near.append(rates[:, row - 1, column])
    return np.asarray(np.max(near, axis=0))


def _short_documents(rows: int) -> list[int]:
    whole, rest = divmod(rows, SHORT_DOCUMENT)
    return [SHORT_DOCUMENT] * whole + [rest] * bool(rest)


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    """Each rounded to four digits, more than a measurement has."""
    return tuple(float(f"{value:.4g}") for value in values)


def affine(x: Sequence[float], y: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """A linear fit of seconds: nanoseconds at x = 0 and per x, neither below 0.

    It weighs relative errors, so that the small values determine the constant.
    """
    points, seconds = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    slope, constant = np.polyfit(points, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
    if constant < 0:
        slope, constant = np.mean(seconds / points), 0.0
    return float(round(max(constant, 0.0) * 1e9)), float(f"{max(slope, 0.0) * 1e9:.4g}")
