"""Dense attention against values by hand and torch's own; what the kernel made of it promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_wlb.attention import kernels_exact
from lightning_wlb.attention.kernel_interface import AttentionOptions
from lightning_wlb.attention.kernels_exact import exact_attention
from tests.attention.support import (
    SEGMENTS,
    Watched,
    attending,
    metadata_of,
    random_inputs,
    results,
)
from tests.device import DEVICE
from tests.oracle import dense_attention

OPTIONS = AttentionOptions(0.3, 100, 2.0)


def test_by_hand() -> None:
    """Equal scores: a token averages the values of its own document up to itself."""
    q = torch.zeros(5, 1, 2, dtype=torch.float64)
    v = torch.tensor([1.0, 3.0, 10.0, 20.0, 60.0], dtype=torch.float64).reshape(5, 1, 1)
    v = v.expand(5, 1, 2)
    documents = torch.tensor([7, 7, 2, 2, 2])
    out = dense_attention(q, q, v, documents, torch.tensor([0, 1, 0, 1, 2]))
    assert out[:, 0, 0].tolist() == [1.0, 2.0, 10.0, 15.0, 30.0]
    # The order of rows does not matter, positions do: 20 is now first and sees itself only.
    out = dense_attention(q, q, v, documents, torch.tensor([0, 1, 2, 0, 1]))
    assert out[:, 0, 0].tolist() == [1.0, 2.0, 30.0, 20.0, 40.0]


def test_softcap_and_sinks_by_hand() -> None:
    q = torch.tensor([[[0.0]], [[2.0]]], dtype=torch.float64)
    k = torch.tensor([[[0.0]], [[3.0]]], dtype=torch.float64)
    v = torch.tensor([[[8.0]], [[1.0]]], dtype=torch.float64)
    named = {"document_ids": torch.zeros(2), "positions": torch.arange(2)}
    capped = 2 * math.tanh(6 / 2)
    out = dense_attention(q, k, v, **named, softcap=2.0)
    wanted = (8 + math.exp(capped)) / (1 + math.exp(capped))
    assert out[1].item() == pytest.approx(wanted, rel=1e-14)
    # Three times the weight of a score of 0, and no value: the sink is not capped.
    sinks = torch.tensor([math.log(3)], dtype=torch.float64)
    out = dense_attention(q, k, v, **named, softcap=2.0, sinks=sinks)
    assert out[0].item() == pytest.approx(2, rel=1e-14)
    wanted = (8 + math.exp(capped)) / (4 + math.exp(capped))
    assert out[1].item() == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_one_document_is_causal_attention(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 6, 4, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 9, kv_heads, 4, dtype=torch.float64, generator=generator)
    out = dense_attention(q, k, v, torch.zeros(9), torch.arange(9))
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


def test_keys_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 8, 2, 4, dtype=torch.float64, generator=generator)
    documents, positions = torch.zeros(8), torch.arange(8)
    whole = dense_attention(q, k, v, documents, positions)
    tail = dense_attention(q[5:], k, v, documents[5:], positions[5:], documents, positions)
    torch.testing.assert_close(tail, whole[5:], rtol=1e-14, atol=1e-14)


def watched(segments: list[tuple[int, int]]) -> Watched:
    *inputs, gradient = random_inputs(segments, 4, 2)
    inputs.append(torch.linspace(-1, 1, 4, dtype=torch.float64))
    attend = attending(exact_attention, metadata_of(segments), OPTIONS)
    with Watched() as watch:
        results(attend, inputs, gradient)
    return watch


def test_no_operator_adds_up_in_an_order_of_its_own() -> None:
    """Those of torch that do so on CUDA, if deterministic algorithms are not asked for."""
    names = watched(list(SEGMENTS)).names
    assert {"bmm", "_softmax_backward_data"} <= names
    unordered = ("index", "scatter", "put", "cumsum", "embedding", "bincount", "histc")
    assert not [name for name in names if any(part in name for part in unordered)]


def test_scores_of_one_block_at_a_time_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_exact, "BLOCK", 16)
    assert watched([(64, 300)] * 4).largest <= 4 * max(16 * (16 + 99 + 1), 300 * 4 * 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_call_gives_the_same_bits_in_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    *inputs, gradient = random_inputs(SEGMENTS, 4, 2)
    inputs = [x.to(dtype) for x in inputs]
    attend = attending(exact_attention, metadata_of(SEGMENTS, DEVICE), OPTIONS)
    once, again = (results(attend, inputs, gradient) for _ in range(2))
    assert {x.dtype for x in once} == {dtype}
    for x, y in zip(once, again, strict=True):
        assert torch.equal(x, y)


def test_all_of_it_is_on_the_device_of_the_queries() -> None:
    """Forward and backward on tensors without memory, which mix with no others."""
    *inputs, gradient = (x.to("meta") for x in random_inputs(SEGMENTS, 4, 2))
    inputs.append(torch.empty(4, device="meta", dtype=torch.float64))
    metadata = metadata_of(SEGMENTS)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return exact_attention(q, k, v, metadata, replace(OPTIONS, sinks=sinks))

    assert {x.device.type for x in results(attend, inputs, gradient)} == {"meta"}


def test_segments_without_queries_or_keys_for_them_are_refused() -> None:
    for segment in ((0, 1), (2, 1)):
        *inputs, _ = random_inputs([segment], 2, 2)
        with pytest.raises(ValueError, match=f"{segment[0]} queries and 1 keys"):
            exact_attention(*inputs, metadata_of([segment]), OPTIONS)
