"""The definition of correct, held against hand-computed values and torch's own attention."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_wlb.attention.kernels_exact import dense_attention


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


def test_scale() -> None:
    q = torch.tensor([[[0.0]], [[2.0]]], dtype=torch.float64)
    k = torch.tensor([[[0.0]], [[3.0]]], dtype=torch.float64)
    v = torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64)
    out = dense_attention(q, k, v, torch.zeros(2), torch.arange(2), scale=0.5)
    assert out[1].item() == pytest.approx(math.exp(3) / (1 + math.exp(3)), rel=1e-14)


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
