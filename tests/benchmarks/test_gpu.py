"""The program for an hour on a GPU: what its rows are, of kernels that are counted and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import kernels, right
from benchmarks.gpu.kernels import bare_call
from benchmarks.gpu.papers import PAPER, figure_10, figure_15
from benchmarks.gpu.papers import SMALL as SMALL_SIZES
from benchmarks.gpu.trace import kind_of, shares
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("flash::FlashAttnFwdSm90<cutlass::gemm::KernelTma>", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("aten::addmm", "products"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_of_kernels() -> None:
    found = shares([("copy", 10.0), ("gemm", 60.0), ("copy", 10.0), ("flash", 15.0), ("add", 5.0)])
    assert found["shares"] == {"other": 0.25, "products": 0.6, "attention": 0.15}
    assert found["milliseconds"] == 0.1
    assert found["largest_others"] == [
        {"name": "copy", "share": 0.2, "calls": 2},
        {"name": "add", "share": 0.05, "calls": 1},
    ]


REPORT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="error" value="1e-3"/></properties></testcase>
<testcase name="b"><failure message="short">long text</failure></testcase>
<testcase name="c"><skipped message="needs a CUDA device"/></testcase>
<testcase name="d"><skipped message="needs a CUDA device"/></testcase>
<testcase name="e"><error message="only a message"/></testcase>
</testsuite></testsuites>"""


def test_what_became_of_tests() -> None:
    assert right.outcome(REPORT) == {
        "passed": 1,
        "failed": 2,
        "skipped": 2,
        "failures": [
            {"test": "b", "text": "long text"},
            {"test": "e", "text": "only a message"},
        ],
        "skipped_for": {"needs a CUDA device": 2},
        "recorded": {"a": {"error": "1e-3"}},
    }
    assert "tests/attention/test_backends.py" in right.files_with_gpu_tests()
