"""Variable-length attention against the dense reference, its choice of kernel and its timer."""

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_wlb.attention import varlen
from lightning_wlb.attention.reference import dense_attention
from lightning_wlb.attention.sharding import layout, rank_indices
from lightning_wlb.attention.varlen import AttentionMetadata, VarlenAttention, available_backends

Segments = Sequence[tuple[int, int]]
"""(queries, keys) of each segment."""

SEGMENTS: Segments = [(1, 1), (5, 5), (1, 9), (37, 101), (3, 600), (1, 1), (2, 3), (257, 257)]


def metadata_of(segments: Segments, device: str = "cpu") -> AttentionMetadata:
    queries, keys = ([0, *(segment[part] for segment in segments)] for part in (0, 1))
    return AttentionMetadata(
        rows=sum(queries),
        queries=sum(queries),
        cu_seqlens_q=torch.tensor(queries).cumsum(0).to(torch.int32),
        cu_seqlens_k=torch.tensor(keys).cumsum(0).to(torch.int32),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        key_index=torch.arange(sum(keys)),
    ).to(device)


def random_inputs(
    segments: Segments, heads: int, kv_heads: int, head_dim: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient of the output in float64."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (sum(segment[part] for segment in segments) for part in (0, 1))
    return tuple(
        torch.randn(rows, count, head_dim, dtype=torch.float64, generator=generator)
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    )


def results(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Sequence[Tensor],
    gradient: Tensor,
) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out))]


def reference(
    segments: Segments, scale: float | None = None, sliding_window: int | None = None
) -> Callable[..., Tensor]:
    ids, positions, key_ids, key_positions = (
        torch.cat([torch.tensor(part) for part in parts])
        for parts in zip(
            *(
                ([number] * q, list(range(k - q, k)), [number] * k, list(range(k)))
                for number, (q, k) in enumerate(segments)
            ),
            strict=True,
        )
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_attention(
            q, k, v, ids, positions, key_ids, key_positions, scale, sliding_window
        )

    return attend


def assert_close(got: Sequence[Tensor], wanted: Sequence[Tensor], bound: float) -> None:
    """Relative error in the 2-norm, of the output and of each gradient.

    Where a query sees one key its gradient is zero, by cancellation of terms of size 1.
    """
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        error = (x.cpu().double() - y).norm() / y.norm().clamp(min=1)
        assert error <= bound, f"{name}: relative error {error:.1e} > {bound:.0e}"


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_cpu_equals_dense(heads: int, kv_heads: int, dtype: torch.dtype, bound: float) -> None:
    *inputs, gradient = random_inputs(SEGMENTS, heads, kv_heads)
    metadata = metadata_of(SEGMENTS)
    attention = VarlenAttention("cpu")
    got = results(
        lambda q, k, v: attention(q, k, v, metadata), [x.to(dtype) for x in inputs], gradient
    )
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
)
@settings(max_examples=60, deadline=None)
def test_any_segments_equal_dense(
    segments: Segments,
    heads: tuple[int, int],
    head_dim: int,
    scale: float | None,
    sliding_window: int | None,
) -> None:
    *inputs, gradient = random_inputs(segments, *heads, head_dim)
    metadata = metadata_of(segments)
    attention = VarlenAttention("cpu", sliding_window)
    got = results(lambda q, k, v: attention(q, k, v, metadata, scale), inputs, gradient)
    wanted = results(reference(segments, scale, sliding_window), inputs, gradient)
    assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_long_sliding_windows_equal_dense(dtype: torch.dtype, bound: float) -> None:
    """Longer than the blocks that the CPU kernel cuts, so that a key is read by several."""
    segments = [(700, 900), (300, 300)]
    *inputs, gradient = random_inputs(segments, 2, 1)
    attention, metadata = VarlenAttention("cpu", 600), metadata_of(segments)
    got = results(
        lambda q, k, v: attention(q, k, v, metadata), [x.to(dtype) for x in inputs], gradient
    )
    assert_close(got, results(reference(segments, None, 600), inputs, gradient), bound)


def test_a_window_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window=0: a token sees at least itself"):
        VarlenAttention("cpu", 0)


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


def test_metadata_from_indices_and_to() -> None:
    made = layout("per_document", [10, 7], 2, 4)
    indices = rank_indices(made, 0)
    metadata = AttentionMetadata.from_indices(indices, made.rows, 2)
    assert (metadata.rows, metadata.queries, metadata.keys) == (12, 9, 24)
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (3, 9)
    assert metadata.cu_seqlens_q.dtype == metadata.cu_seqlens_k.dtype == torch.int32
    assert metadata.key_index is not None
    assert metadata.key_index.tolist() == indices.key_index.tolist()
    moved = metadata.to("meta")
    assert moved.cu_seqlens_q.device.type == moved.key_index.device.type == "meta"
    assert (moved.rows, moved.queries, metadata.cu_seqlens_q.device.type) == (12, 9, "cpu")

    alone = layout("per_document", [10, 7], 1, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(alone, 0), alone.rows, 1)
    assert metadata.key_index is None
    assert metadata.keys == metadata.queries == 17


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

    monkeypatch.setitem(varlen.BACKENDS, "cpu", lambda: lambda q, k, v, *_: Kernel.apply(q, k, v))
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


def test_timer_changes_no_number() -> None:
    *inputs, gradient = random_inputs(SEGMENTS, 4, 2)
    plain, timed = VarlenAttention("cpu"), VarlenAttention("cpu")
    timed.timer = Counter()
    metadata = metadata_of(SEGMENTS)
    for x, y in zip(
        results(lambda q, k, v: plain(q, k, v, metadata), inputs, gradient),
        results(lambda q, k, v: timed(q, k, v, metadata), inputs, gradient),
        strict=True,
    ):
        assert torch.equal(x, y)
    assert timed.timer.events == ["start", "stop"] * 2


# --- choice of backend and errors ------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def fake_flash(monkeypatch: pytest.MonkeyPatch, version: str) -> list[dict[str, Any]]:
    """Put a flash_attn of this version (or none) in the place of the real one; its calls."""
    calls: list[dict[str, Any]] = []

    def two(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        calls.append(arguments)
        return q.clone()

    def four(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        return two(q, k, v, **arguments), torch.zeros(())

    package: Any = types.ModuleType("flash_attn")
    cute: Any = types.ModuleType("flash_attn.cute")
    if version.startswith("2"):
        package.flash_attn_varlen_func, package.__version__ = two, version
    if version.startswith("4"):
        cute.flash_attn_varlen_func = four
    monkeypatch.setitem(sys.modules, "flash_attn", package if version else None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute if version.startswith("4") else None)
    return calls


def test_auto_without_cuda_is_cpu() -> None:
    *inputs, _ = random_inputs([(4, 4)], 2, 2)
    metadata = metadata_of([(4, 4)])
    assert torch.equal(
        VarlenAttention()(*inputs, metadata), VarlenAttention("cpu")(*inputs, metadata)
    )


@pytest.mark.parametrize(("version", "chosen"), [("2.8.3", "flash"), ("4", "flash"), ("", "torch")])
def test_auto_on_cuda_prefers_flash(
    monkeypatch: pytest.MonkeyPatch, cuda: None, version: str, chosen: str
) -> None:
    fake_flash(monkeypatch, version)
    attention = VarlenAttention()
    assert attention._kernels["cuda"][0] == chosen
    # CPU tensors still run, as with Trainer(accelerator="cpu") on a machine with a GPU.
    *inputs, _ = random_inputs([(4, 4)], 2, 2)
    assert attention(*inputs, metadata_of([(4, 4)])).shape == (4, 2, 8)


@pytest.mark.parametrize("version", ["2.8.3", "4"])
def test_flash_call(monkeypatch: pytest.MonkeyPatch, cuda: None, version: str) -> None:
    calls = fake_flash(monkeypatch, version)
    _, kernel = VarlenAttention("flash")._kernels["cuda"]
    *inputs, _ = random_inputs([(3, 5)], 4, 2)
    metadata = metadata_of([(3, 5)])
    out = kernel(*inputs, metadata.cu_seqlens_q, metadata.cu_seqlens_k, 3, 5, 0.25, None)
    kernel(*inputs, metadata.cu_seqlens_q, metadata.cu_seqlens_k, 3, 5, 0.25, 4)
    assert torch.equal(out, inputs[0])
    plain = {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "cu_seqlens_k": metadata.cu_seqlens_k,
        "max_seqlen_q": 3,
        "max_seqlen_k": 5,
        "softmax_scale": 0.25,
        "causal": True,
    }
    assert calls == [plain, {**plain, "window_size": (3, 0)}]


def varlen_attn_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    *, return_aux=None, scale=None, window_size=(-1, -1),
):  # fmt: skip
    """What torch 2.11 has: no ``enable_gqa``, because its kernel takes groups as they are."""
    raise AssertionError


@pytest.mark.parametrize("version", ["2.11", "this one"])
def test_torch_call(monkeypatch: pytest.MonkeyPatch, cuda: None, version: str) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def varlen_attn(q: Tensor, *arguments: Any, **named: Any) -> Tensor:
        calls.append((arguments[-4:], named))
        return q.clone()

    from torch.nn.attention import varlen as of_torch

    real = varlen_attn_of_2_11 if version == "2.11" else of_torch.varlen_attn
    signature = inspect.signature(real)
    varlen_attn.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    _, kernel = VarlenAttention("torch")._kernels["cuda"]
    *inputs, _ = random_inputs([(3, 5)], 4, 2)
    metadata = metadata_of([(3, 5)])
    lengths = (metadata.cu_seqlens_q, metadata.cu_seqlens_k, 3, 5)
    kernel(*inputs, *lengths, None, None)
    kernel(*inputs, *lengths, None, 4)
    kernel(inputs[0][:, :2], *inputs[1:], *lengths, 0.5, None)
    grouped = {"enable_gqa": True} if "enable_gqa" in signature.parameters else {}
    assert calls == [
        (lengths, {"scale": None, "window_size": (-1, 0), **grouped}),
        (lengths, {"scale": None, "window_size": (3, 0), **grouped}),
        (lengths, {"scale": 0.5, "window_size": (-1, 0)}),
    ]
    for positional, named in calls:
        signature.bind(*inputs, *positional, **named)


def test_an_old_varlen_attn_is_refused(monkeypatch: pytest.MonkeyPatch, cuda: None) -> None:
    """As of torch 2.10, where causal was a flag."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    with pytest.raises(ValueError, match=r"has no window_size; 2\.11 or newer is needed"):
        VarlenAttention("torch")


def test_the_torch_signature_has_what_is_passed() -> None:
    """Pins the real function: a renamed parameter shows here and not on a user's GPU."""
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= set(names)
    # 2.13 refuses groups without it.
    assert "enable_gqa" in names or torch.__version__.startswith(("2.11", "2.12"))


def test_missing_backends_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'flex'.*auto, cpu, torch"):
        VarlenAttention("flex")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available_backends() == ["cpu"]
    with pytest.raises(ValueError, match="'torch' is not available: there is no CUDA device"):
        VarlenAttention("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake_flash(monkeypatch, "")
    assert available_backends() == ["cpu", "torch"]
    with pytest.raises(ValueError, match=r"flash-attn.*flash-attn-4.*Available here: cpu, torch\."):
        VarlenAttention("flash")
    fake_flash(monkeypatch, "2.0.9")
    with pytest.raises(ValueError, match=r"2\.0\.9 aligns causal masks at the top left"):
        VarlenAttention("flash")


def test_wrong_device_or_dtype_is_explained(monkeypatch: pytest.MonkeyPatch, cuda: None) -> None:
    *inputs, _ = random_inputs([(4, 4)], 2, 2)
    with pytest.raises(ValueError, match="'torch' runs on cuda, but the tensors are on cpu"):
        VarlenAttention("torch")(*inputs, metadata_of([(4, 4)]))
    fake_flash(monkeypatch, "2.8.3")
    on_device = types.SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'flash' has no kernel for torch\.float64 on CUDA.*bf16"):
        VarlenAttention()._kernel_for(on_device)  # type: ignore[arg-type]


def test_a_window_wider_than_the_batch_was_made_for_is_refused() -> None:
    metadata = metadata_of([(3, 5)])
    metadata.sliding_window = 3
    q, k = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8)
    for window in (None, 4):
        with pytest.raises(ValueError, match=f"window of 3 tokens.*sliding_window={window} reads"):
            VarlenAttention("cpu", window)(q, k, k, metadata)
    for window in (2, 3):
        VarlenAttention("cpu", window)(q, k, k, metadata)


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
    with pytest.raises(ValueError, match="one dtype"):
        attention(q.bfloat16(), k, k, metadata)
    with pytest.raises(ValueError, match=r"one device, not cpu.*meta"):
        attention(q, k, k, metadata.to("meta"))
    metadata.cu_seqlens_q = torch.tensor([0, 3, 3], dtype=torch.int32)
    metadata.cu_seqlens_k = torch.tensor([0, 4, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="segment with 0 queries and 1 keys"):
        attention(q, k, k, metadata)


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "flash", "auto"])
@pytest.mark.parametrize("sliding_window", [None, 1, 5, 100])
def test_gpu_equals_dense(backend: str, dtype: torch.dtype, sliding_window: int | None) -> None:
    if backend not in ("auto", *available_backends()):
        pytest.skip(f"{backend} is not installed")
    *inputs, gradient = random_inputs(SEGMENTS, 8, 2, head_dim=64)
    metadata = metadata_of(SEGMENTS, "cuda")
    attention = VarlenAttention(backend, sliding_window)
    got = results(
        lambda q, k, v: attention(q, k, v, metadata),
        [x.to("cuda", dtype) for x in inputs],
        gradient,
    )
    assert_close(got, results(reference(SEGMENTS, None, sliding_window), inputs, gradient), 1e-2)
