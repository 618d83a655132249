"""The definition of a right loss and gradient: one process, dense masked attention, no packing.

Labels, positions and masks are built here from the raw documents; nothing of the project is used
but the model. Each piece runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.models.transformer import Transformer


def oracle(
    model: Transformer,
    documents: Sequence[Sequence[int]],
    pieces: Sequence[tuple[int, int, int]],
    masks: Sequence[Sequence[bool]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Sum of token losses of ``pieces`` and its gradients by parameter name.

    Args:
        model: whole, on one process, with values; its ``.grad`` fields are left alone.
        documents: tokens of each document.
        pieces: (document, origin, stop): each sees tokens [origin, stop) of its document only,
            and its positions count from origin.
        masks: for each document, for each token: whether it may be a target.

    Divide both results by the global number of targets (:func:`count_targets`).
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    device = parameters[0].device
    total = 0.0
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    attend = partial(_attend, model.config.sliding_window)
    with mock.patch.object(model, "attend", attend):
        for document, origin, stop in pieces:
            positions = torch.arange(stop - origin, device=device)
            labels = _labels(documents, masks, document, origin, stop)
            piece = SimpleNamespace(
                tokens=torch.tensor(documents[document][origin:stop], device=device),
                labels=torch.tensor(labels, device=device),
                positions=positions,
                attention=_Positions(positions),
                rows=stop - origin,
                recompute="none",
            )
            loss = model(piece)
            total += loss.item()
            found = torch.autograd.grad(loss, parameters)
            gradients = [old + new for old, new in zip(gradients, found, strict=True)]
    return total, dict(zip(names, gradients, strict=True))


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

    The definition to which every attention of the package is held, and so are whole models'
    gradients. Computed in the dtype of the inputs; give float64 where it is to judge others.

    Args:
        q: [queries, heads, head_dim].
        k: [keys, kv_heads, head_dim]. Query head h reads key head h // (heads / kv_heads).
        v: [keys, kv_heads, v_dim].
        document_ids: int [queries], equal for two tokens that may see each other.
        positions: int [queries], in tokens.
        key_document_ids: int [keys]; the queries' own where the keys are the same tokens.
        key_positions: int [keys]; the queries' own where the keys are the same tokens.
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


def count_targets(
    documents: Sequence[Sequence[int]],
    pieces: Sequence[tuple[int, int, int]],
    masks: Sequence[Sequence[bool]] | None = None,
) -> int:
    """Number of tokens in ``pieces`` that have a target."""
    return sum(label >= 0 for piece in pieces for label in _labels(documents, masks, *piece))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖₂ / ‖reference‖₂; where the reference is zero, 0 if value is, else inf."""
    size = reference.norm().item()
    difference = (value - reference).norm().item()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _labels(
    documents: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]] | None,
    document: int,
    origin: int,
    stop: int,
) -> list[int]:
    """Each token's next token in its document; -100 where there is none or it is masked."""
    tokens = documents[document]
    labels = []
    for following in range(origin + 1, stop + 1):
        wanted = following < len(tokens) and (masks is None or masks[document][following])
        labels.append(tokens[following] if wanted else -100)
    return labels


class _Positions:
    """Stands for the attention metadata: a piece by itself needs its positions only."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def for_layer(self, layer: int, recomputed: bool) -> _Positions:
        return self


def _attend(
    sliding_window: int | None,
    queries: Callable[[], Tensor],
    k: Tensor,
    v: Tensor,
    project: Callable[[Tensor], Tensor],
    metadata: Any,
    groups: ProcessGroups,
) -> Tensor:
    assert groups == ProcessGroups(), "one process"
    positions = metadata.positions
    out = dense_attention(
        queries(),
        k,
        v,
        torch.zeros_like(positions),
        positions,
        sliding_window=sliding_window,
    )
    return project(out)
