"""The program for an hour on a GPU: what its rows are, of kernels that are counted and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import bare_call
from benchmarks.gpu.papers import PAPER, figure_10, figure_15
from benchmarks.gpu.papers import SMALL as SMALL_SIZES
from benchmarks.workloads import LLAMA2_7B_LAYER
from lightning_wlb.attention.kernel_interface import PLAIN
from lightning_wlb.attention.kernels_cpu import cpu_attention
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.sharding import SHARDINGS
from tests.attention.support import metadata_of, random_inputs

CPU = torch.device("cpu")


class CountingKernel:
    """In place of times the number of the call."""

    shape = LLAMA2_7B_LAYER
    calls = 0

    def ms(self, segments: Any, **options: Any) -> float:
        self.calls += 1
        return float(self.calls)


def test_figure_15_compares_what_was_timed() -> None:
    latency = LatencyModel(Profile.load("h100"), LLAMA2_7B_LAYER, Mesh(context=2))
    row = figure_15(CountingKernel(), latency, [[600, 424]], 2, most_keys=1 << 20)  # type: ignore[arg-type]
    # Two ranks of each sharding in turn: the slower one is the later.
    for number, name in enumerate(SHARDINGS):
        assert row["ms"][name] == 2 * number + 2
    assert row["ms"]["heads"] == 2 * len(SHARDINGS) + 1
    assert row["ms"]["optimal of the paper's"] == min(row["ms"][name] for name in PAPER)
    best = min(row["ms"][name] for name in SHARDINGS)
    assert row["ours_over_best_single"] == row["ms"]["our choice"] / best


def test_figure_10_counts_the_pairs_of_the_last_queries() -> None:
    kernel = CountingKernel()
    row = figure_10(kernel, SMALL_SIZES, 16)  # type: ignore[arg-type]
    assert (row["segments"], row["keys"]) == (1, 64)
    pairs = sum(range(49, 65))
    assert row["forward_tflops"] == pytest.approx(4 * 32 * 128 * pairs / 1e9)


def test_the_bare_call_is_the_library_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [(5, 9), (3, 3)]
    q, k, v, _ = random_inputs(segments, 4, 2)
    metadata = metadata_of(segments)

    def library(q, k, v, *, causal: bool, **bounds: Any):
        assert causal
        return cpu_attention(q, k, v, SimpleNamespace(**bounds), PLAIN), None

    monkeypatch.setattr(kernels, "flash_library", lambda: (library, 2))
    wanted = bare_call("cpu", metadata)(q, k, v)
    assert torch.equal(bare_call("flash_attn 2", metadata)(q, k, v), wanted)
