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
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which a token sees its own document up to its own position.

    Computed in the dtype of the inputs; give float64 where it is to judge others.

    Args:
        q: [queries, heads, head_dim].
        k: [keys, kv_heads, head_dim]. Query head h reads key head h // (heads / kv_heads).
        v: [keys, kv_heads, v_dim].
        document_ids: int [queries], equal for two tokens that may see each other.
        positions: int [queries], in tokens.
        key_document_ids: int [keys]; the queries' own where the keys are the same tokens.
        key_positions: int [keys]; likewise.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.
        sliding_window: most tokens that a token sees, itself included; all if None.
        softcap: scaled scores s become softcap · tanh(s / softcap); none if None.
        sinks: [heads], a score for each head that takes part in softmax and has no value.

    Returns:
        [queries, heads, v_dim]. A query that may see no key at all gets NaN, or zero with sinks.
    """
    key_document_ids = document_ids if key_document_ids is None else key_document_ids
    key_positions = positions if key_positions is None else key_positions
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    visible = (document_ids[:, None] == key_document_ids[None, :]) & (
        key_positions[None, :] <= positions[:, None]
    )
    if sliding_window is not None:
        visible &= positions[:, None] - key_positions[None, :] < sliding_window
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)
