"""Which kernel is chosen, how the CUDA ones are called, and what is said where one is missing.

Without a GPU torch's own operator runs on tensors without memory. The packages of FlashAttention
have tests/attention/test_kernels_gpu.py.
"""

import inspect
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_wlb.attention import backends as varlen
from lightning_wlb.attention import kernels_gpu
from lightning_wlb.attention.backends import VarlenAttention, available_backends, kernel_name
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.kernels_exact import exact_attention
from lightning_wlb.attention.kernels_gpu import load_torch
from tests.attention.flash import fake_flash, on_device_of
from tests.attention.support import (
    SEGMENTS,
    assert_close,
    attending,
    metadata_of,
    random_inputs,
    reference,
    results,
)

pytestmark = pytest.mark.usefixtures("every_backend")


def test_on_cpu_the_name_of_the_kernel_takes_no_library(
    monkeypatch: pytest.MonkeyPatch, cuda: None
) -> None:
    """Which may take seconds to import, as CUDA does to start."""
    monkeypatch.setitem(varlen.BACKENDS, "flash", varlen.AttentionBackend(pytest.fail, ("cuda",)))
    assert kernel_name("auto", "cpu") == kernel_name("cpu", torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="'torch' runs on cuda, but the tensors are on cpu"):
        kernel_name("torch", "cpu")


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
    kernel(*inputs, metadata, PLAIN)
    kernel(*inputs, metadata, AttentionOptions(sliding_window=4))
    kernel(inputs[0][:, :2], *inputs[1:], metadata, AttentionOptions(scale=0.5))
    grouped = {"enable_gqa": True} if "enable_gqa" in signature.parameters else {}
    assert calls == [
        (lengths, {"scale": None, "window_size": (-1, 0), **grouped}),
        (lengths, {"scale": None, "window_size": (3, 0), **grouped}),
        (lengths, {"scale": 0.5, "window_size": (-1, 0)}),
    ]
    with pytest.raises(ValueError, match=r"softcap=50\.0: attention backend 'torch'.*'flash'"):
        kernel(*inputs, metadata, AttentionOptions(softcap=50.0))
    for positional, named in calls:
        signature.bind(*inputs, *positional, **named)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("sliding_window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_torchs_own_operators_take_the_call_forward_and_backward(
    kv_heads: int, sliding_window: int | None, sinks: bool
) -> None:
    """Its schema, its shapes and its autograd formula, on tensors without memory."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    q, k, v = tensor(10, 4, 64), tensor(20, kv_heads, 64), tensor(20, kv_heads, 64)
    metadata = metadata_of([(4, 8), (6, 12)], "meta")
    of_heads = tensor(4) if sinks else None
    options = AttentionOptions(sliding_window=sliding_window, sinks=of_heads)
    out = load_torch()(q, k, v, metadata, options)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    leaves = [each for each in (q, k, v, of_heads) if each is not None]
    gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [each.shape for each in gradients] == [each.shape for each in leaves]


def test_sinks_around_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's operators in their place, which compute what those are documented to.

    Log-sum-exp is [heads, queries], and a window says where nothing is causal by name.
    """
    one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def by_head(*every: Tensor) -> list[Tensor]:
        return [x.transpose(0, 1).unsqueeze(0) for x in every]

    def forward(q, k, v, _q, _k, most_q, most_k, dropout, causal, debug, **rest):
        assert (most_q, most_k, dropout, causal, debug) == (9, 9, 0.0, True, False)
        assert rest == {"scale": 0.3, "window_size_left": -1, "window_size_right": 0}
        out, lse = one(*by_head(q, k, v), 0.0, True, scale=0.3)
        return out[0].transpose(0, 1), lse[0], None, None, None

    def backward(grad, q, k, v, out, lse, *others, **rest):
        assert others[2:] == (9, 9, 0.0, True, None, None)
        assert lse.is_contiguous()
        assert rest["window_size_left"] == -1
        found = back(*by_head(grad, q, k, v, out), lse[None], 0.0, True, scale=0.3)
        return [x[0].transpose(0, 1) for x in found]

    monkeypatch.setattr(kernels_gpu, "_forward", forward)
    monkeypatch.setattr(kernels_gpu, "_backward", backward)
    *inputs, gradient = random_inputs([(9, 9)], 3, 3)
    inputs.append(torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64))
    options = AttentionOptions(0.3)
    got = results(attending(load_torch(), metadata_of([(9, 9)]), options), inputs, gradient)
    assert_close(got, results(reference([(9, 9)], options), inputs, gradient), 1e-12)


def test_missing_backends_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'flex'.*auto, cpu, torch"):
        VarlenAttention("flex")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available_backends() == ["cpu", "exact"]
    with pytest.raises(ValueError, match="'torch' is not available: there is no CUDA device"):
        VarlenAttention("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_device_of(monkeypatch, 9)
    fake_flash(monkeypatch)
    assert available_backends() == ["cpu", "torch", "exact"]
    with pytest.raises(
        ValueError, match=r"flash-attn.*flash-attn-4.*Available here: cpu, torch, exact\."
    ):
        VarlenAttention("flash")
    fake_flash(monkeypatch, "2.6.3")
    with (
        pytest.warns(match=r"flash_attn is installed.*2\.7 or newer"),
        pytest.raises(ValueError, match=r"flash_attn \(2\.x\): version 2\.6\.3 is older"),
    ):
        VarlenAttention("flash")


def test_wrong_device_or_dtype_is_explained(monkeypatch: pytest.MonkeyPatch, cuda: None) -> None:
    *inputs, _ = random_inputs([(4, 4)], 2, 2)
    with pytest.raises(ValueError, match="'torch' runs on cuda, but the tensors are on cpu"):
        VarlenAttention("torch")(*inputs, metadata_of([(4, 4)]))
    fake_flash(monkeypatch, "2.8.3")
    on_device: Any = types.SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float64)
    message = r"'flash_attn 2' has no torch\.float64 on CUDA.*bf16.*attention_backend='exact'"
    with pytest.raises(ValueError, match=message):
        VarlenAttention()._kernel_for(on_device)
    assert VarlenAttention("exact")._kernel_for(on_device) is exact_attention


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "flash", "auto", "exact"])
@pytest.mark.parametrize("sliding_window", [None, 1, 5, 100])
@pytest.mark.parametrize("extra", ["none", "softcap", "sinks"])
def test_gpu_equals_dense(
    backend: str, dtype: torch.dtype, sliding_window: int | None, extra: str
) -> None:
    if backend not in ("auto", *available_backends()):
        pytest.skip(f"{backend} is not installed")
    attention = VarlenAttention(backend)
    refusing = {"softcap": "torch", "sinks": "flash_attn"}.get(extra, "none")
    if attention.kernel_name("cuda").startswith(refusing):
        pytest.skip("refused")
    *inputs, gradient = random_inputs(SEGMENTS, 8, 2, head_dim=64)
    metadata = metadata_of(SEGMENTS, "cuda")
    softcap = 2.0 if extra == "softcap" else None
    options = AttentionOptions(sliding_window=sliding_window, softcap=softcap)
    if extra == "sinks":
        inputs.append(torch.linspace(-2, 2, 8, dtype=torch.float64))
    attend = attending(attention, metadata, options)
    got = results(attend, [x.to("cuda", dtype) for x in inputs], gradient)
    assert_close(got, results(reference(SEGMENTS, options), inputs, gradient), 1e-2)
