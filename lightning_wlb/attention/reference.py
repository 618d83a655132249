"""Dense masked attention: the definition of what is correct.

Every other attention of this package is tested against this function, and the gradient oracle of
the test suite uses it; it needs nothing but plain torch operations. Memory and time are
heads · queries · keys, whatever the documents: never train with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor,
    positions: Tensor,
    key_document_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Softmax attention in which a token sees its own document up to its own position.

    Computed in the dtype of the inputs; give float64 where it is to judge others.

    Args:
        q: [queries, heads, head_dim].
        k: [keys, kv_heads, head_dim]. Query head h reads key head h // (heads / kv_heads).
        v: [keys, kv_heads, head_dim].
        document_ids: int [queries], equal for two tokens that may see each other.
        positions: int [queries], in tokens.
        key_document_ids: int [keys]; the queries' own where the keys are the same tokens.
        key_positions: int [keys]; likewise.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.
        sliding_window: most tokens that a token sees, itself included; all if None.

    Returns:
        [queries, heads, head_dim]. A query that may see no key at all gets NaN.
    """
    key_document_ids = document_ids if key_document_ids is None else key_document_ids
    key_positions = positions if key_positions is None else key_positions
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    visible = (document_ids[:, None] == key_document_ids[None, :]) & (
        key_positions[None, :] <= positions[:, None]
    )
    if sliding_window is not None:
        visible &= positions[:, None] - key_positions[None, :] < sliding_window
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
