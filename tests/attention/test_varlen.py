"""Variable-length attention against the dense reference, its timer, and its answers to mistakes."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_wlb.attention import backends as varlen
from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import AttentionOptions
from tests.attention.support import (
    SEGMENTS,
    Segments,
    assert_close,
    attending,
    metadata_of,
    random_inputs,
    reference,
    results,
)
from tests.device import DEVICE


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_cpu_equals_dense(heads: int, kv_heads: int, dtype: torch.dtype, bound: float) -> None:
    *inputs, gradient = random_inputs(SEGMENTS, heads, kv_heads)
    attend = attending(VarlenAttention(), metadata_of(SEGMENTS, DEVICE))
    got = results(attend, [x.to(dtype) for x in inputs], gradient)
    assert {x.dtype for x in got} == {dtype}
    assert_close(got, results(reference(SEGMENTS), inputs, gradient), bound)


@given(
    segments=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1])),
        min_size=1,
        max_size=6,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([1, 5, 16]),
    scale=st.sampled_from([None, 0.3]),
    sliding_window=st.none() | st.integers(1, 70),
    softcap=st.sampled_from([None, 0.7, 50.0]),
    sinks=st.booleans(),
    backend=st.sampled_from(["auto", "exact"]),
)
@settings(max_examples=40)
def test_any_segments_equal_dense(
    segments: Segments,
    heads: tuple[int, int],
    head_dim: int,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: bool,
    backend: str,
) -> None:
    *inputs, gradient = random_inputs(segments, *heads, head_dim)
    if sinks:
        inputs.append(torch.linspace(-3, 3, heads[0], dtype=torch.float64))
    options = AttentionOptions(scale, sliding_window, softcap)
    attend = attending(VarlenAttention(backend), metadata_of(segments, DEVICE), options)
    got = results(attend, inputs, gradient)
    wanted = results(reference(segments, options), inputs, gradient)
    assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("backend", "softcap"), [("auto", None), ("exact", 2.0)])
def test_long_sliding_windows_equal_dense(
    dtype: torch.dtype, bound: float, backend: str, softcap: float | None
) -> None:
    """Longer than the blocks that kernels cut, so that a key is read by several."""
    segments = [(300, 500), (270, 270)]
    *inputs, gradient = random_inputs(segments, 2, 1)
    inputs.append(torch.tensor([-1.0, 2.0], dtype=torch.float64))
    options = AttentionOptions(sliding_window=400, softcap=softcap)
    attend = attending(VarlenAttention(backend), metadata_of(segments, DEVICE), options)
    got = results(attend, [x.to(dtype) for x in inputs], gradient)
    assert {x.dtype for x in got} == {dtype}
    assert_close(got, results(reference(segments, options), inputs, gradient), bound)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window=0: a token sees at least itself"):
        AttentionOptions(sliding_window=0)
    for softcap in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"softcap={softcap}: give a positive"):
            AttentionOptions(softcap=softcap)


def test_strided_inputs_and_gradients() -> None:
    """Views with any stride: the kernel itself reads the last dimension as dense, silently."""
    segments = [(4, 9), (3, 3)]
    *inputs, _ = random_inputs(segments, 2, 2)
    metadata = metadata_of(segments)
    last_dimension_strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    leaves = [x.requires_grad_() for x in last_dimension_strided]
    out = VarlenAttention("cpu")(*leaves, metadata)
    got = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]  # a gradient of stride 0
    ones = torch.ones(7, 2, 8, dtype=torch.float64)
    assert_close(got, results(reference(segments), inputs, ones), 1e-12)


def test_no_queries_keep_the_graph() -> None:
    metadata = metadata_of([])
    q, k, v = (torch.empty(0, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = VarlenAttention("cpu")(q, k, v, metadata)
    assert out.shape == (0, 4, 8)
    for gradient, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.shape == x.shape
    # A sink is there without queries, and its gradient is zero, even if it is not finite.
    sinks = torch.full((4,), -math.inf, requires_grad=True)
    out = VarlenAttention("cpu")(q, k, v, metadata, AttentionOptions(sinks=sinks))
    assert torch.autograd.grad(out.sum(), sinks)[0].tolist() == [0.0] * 4


class Counter:
    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")


def test_timer_brackets_the_kernel_in_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = Counter()

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.events.append("forward")
            return q + k + v

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            timer.events.append("backward")
            return gradient, gradient, gradient

    class Upstream(torch.autograd.Function):
        """A collective before the kernel: its backward must not be timed."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            timer.events.append("collective")
            return gradient

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        result: Tensor = Kernel.apply(q, k, v)
        return result

    stand_in = varlen.AttentionBackend(lambda: ("cpu", kernel), ("cpu",))
    monkeypatch.setitem(varlen.BACKENDS, "cpu", stand_in)
    attention = VarlenAttention("cpu")
    attention.timer = timer
    q, k, v = (torch.randn(3, 1, 2, requires_grad=True) for _ in range(3))
    out = attention(q, Upstream.apply(k), v, metadata_of([(3, 3)]))
    assert timer.events == ["start", "forward", "stop"]
    out.sum().backward()
    assert timer.events[3:] == ["start", "backward", "stop", "collective"]
    with torch.no_grad():
        attention(q, k, v, metadata_of([(3, 3)]))
    assert timer.events[7:] == ["start", "forward", "stop"]
    attention.timer = None
    attention(q, k, v, metadata_of([(3, 3)]))
    assert len(timer.events) == 11


def test_timer_stops_where_sinks_alone_have_a_gradient() -> None:
    timed = VarlenAttention("cpu")
    timed.timer = Counter()
    *inputs, _ = random_inputs([(3, 5)], 4, 2)
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    timed(*inputs, metadata_of([(3, 5)]), AttentionOptions(sinks=sinks)).sum().backward()
    assert timed.timer.events == ["start", "stop"] * 2


def test_a_window_wider_than_the_batch_was_made_for_is_refused() -> None:
    metadata = replace(metadata_of([(3, 5)]), sliding_window=3)
    q, k = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8)
    for window in (None, 4):
        with pytest.raises(ValueError, match=f"window of 3 tokens.*sliding_window={window} reads"):
            VarlenAttention("cpu")(q, k, k, metadata, AttentionOptions(sliding_window=window))
    for window in (2, 3):
        VarlenAttention("cpu")(q, k, k, metadata, AttentionOptions(sliding_window=window))


def test_mismatches_are_explained() -> None:
    attention = VarlenAttention("cpu")
    metadata = metadata_of([(3, 5)])
    q, k = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="3 queries and 5 keys"):
        attention(torch.zeros(4, 4, 8), k, k, metadata)
    with pytest.raises(ValueError, match="3 queries and 5 keys"):
        attention(q, k[:4], k[:4], metadata)
    with pytest.raises(ValueError, match="4 heads are no multiple of 3 kv_heads"):
        attention(q, torch.zeros(5, 3, 8), torch.zeros(5, 3, 8), metadata)
    with pytest.raises(ValueError, match=r"k \(5, 2, 8\), v \(5, 2, 7\)"):
        attention(q, k, k[..., :7], metadata)
    for sinks in (torch.zeros(2), torch.zeros(4, 1), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"sinks .* one for each of this rank's query heads"):
            attention(q, k, k, metadata, AttentionOptions(sinks=sinks))
    with pytest.raises(ValueError, match="one dtype"):
        attention(q.bfloat16(), k, k, metadata)
    with pytest.raises(ValueError, match=r"one device, not cpu.*meta"):
        attention(q, k, k, metadata.to("meta"))
    metadata = replace(
        metadata,
        cu_seqlens_q=torch.tensor([0, 3, 3], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 4, 5], dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="segment with 0 queries and 1 keys"):
        attention(q, k, k, metadata)
