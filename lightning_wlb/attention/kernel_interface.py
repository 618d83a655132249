"""The signature of a variable-length attention kernel, and segments and sinks, which kernels share.

Every kernel has the signature of :class:`Kernel`; :mod:`.backends` chooses one and checks its
arguments. :class:`AttentionOptions` has what differs from layer to layer of a model.

A *sink* is a score without a value. With lse the log-sum-exp of a query's scores, s the sink of its
head and out the attention without it,

    lse' = log(exp lse + exp s),   out' = out · exp(lse - lse').

A kernel's backward recomputes probabilities as exp(score - lse) and subtracts grad · out from their
gradients. Given out' and lse' in place of its own it therefore yields exactly the gradients of
queries, keys and values with sinks. The sink's own probability exp(s - lse') leaves

    grad s = - Σ over rows of exp(s - lse') · (grad · out').

Cost of sinks: one pass over the output in forward, one over it and its gradient in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lightning_wlb.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class AttentionOptions:
    """How one layer of a model attends, beside what its queries, keys and values say.

    Args:
        scale: factor of the scores, the products of queries and keys; 1 / sqrt(head_dim) if None.
        sliding_window: most keys that a query sees, its own included; all if None.
        softcap: scaled scores s become softcap · tanh(s / softcap), as in Gemma 2; none if None.
        sinks: [heads], as in gpt-oss: for each query head a learned score that takes part in
            softmax beside those of the keys and has no value, so that the weights of the keys add
            up to less than one. Their gradient is this rank's share: whoever owns the parameter
            adds up those of the ranks of a context-parallel group. None without sinks.

    Raises:
        ValueError: if ``sliding_window`` is below 1, or ``softcap`` is no positive finite number.
    """

    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window={self.sliding_window}: a token sees at least itself, so give at"
                " least 1, or None for no window."
            )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(
                f"softcap={self.softcap}: scores are capped at a positive finite number; give None"
                " for no cap."
            )


PLAIN = AttentionOptions()
"""Every key in sight, the usual scale, no cap and no sinks."""


class Kernel(Protocol):
    """Causal attention of packed queries over packed keys and values; differentiable in all three.

    A segment has n queries and m ≥ n keys and is causal, aligned at the bottom right: its last
    query sees every key, the one before it all keys but the last. Segments never see each other.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend.

        Args:
            q: [queries, heads, head_dim], at least one query, without padding rows.
            k: [keys, kv_heads, head_dim], heads a multiple of kv_heads; in the order of
                ``metadata.cu_seqlens_k``, so that ``metadata.key_index`` has been applied already.
            v: [keys, kv_heads, head_dim].
            metadata: says where segments begin; on the device of ``q``, as are the sinks.
            options: of the layer; sinks get their gradient too.

        Returns:
            [queries, heads, head_dim] in the dtype of q.

        Raises:
            ValueError: if the kernel does not have one of the options; names one that does. Or as
                :func:`segments_of`, where the kernel asks for it.
        """


Segment = tuple[int, int, int, int]
"""First query, number of queries, first key, number of keys before the first query's own."""


def segments_of(metadata: AttentionMetadata) -> Iterator[Segment]:
    """The segments of a call, in order; on an accelerator this waits for the device.

    Raises:
        ValueError: if a segment has no query, or fewer keys than queries.
    """
    queries_of, keys_of = metadata.cu_seqlens_q.tolist(), metadata.cu_seqlens_k.tolist()
    bounds = zip(pairwise(queries_of), pairwise(keys_of), strict=True)
    for (first_query, stop_query), (first_key, stop_key) in bounds:
        queries = stop_query - first_query
        before = stop_key - first_key - queries
        # An empty operand kills the process inside torch's CPU kernel, so this is worth its price.
        if queries < 1 or before < 0:
            raise ValueError(
                f"attention segment with {queries} queries and {stop_key - first_key} keys: there"
                " must be at least one query and at least as many keys as queries."
            )
        yield first_query, queries, first_key, before


def blocks_of(segment: Segment, size: int, sliding_window: int | None) -> Iterator[Segment]:
    """Cut a segment into blocks of ``size`` queries, each with just the keys that its queries see.

    Each block is a segment of its own: its queries are the last of the keys that it reads.
    """
    first_query, queries, first_key, before = segment
    for start in range(0, queries, size):
        ahead = before + start
        missed = 0 if sliding_window is None else max(ahead - (sliding_window - 1), 0)
        yield first_query + start, min(size, queries - start), first_key + missed, ahead - missed


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, [..., head_dim] and [...], with ``sinks`` that broadcast to [...].

    The output may come back in the wider dtype of ``lse``.
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - merged).exp_().unsqueeze(-1), merged


def gradient_of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, [heads], computed in the dtype of ``lse``.

    ``out`` and ``lse`` are those with sinks (:func:`with_sinks`); ``grad_out`` and ``out`` are
    [rows, heads, head_dim], ``lse`` is [rows, heads].
    """
    weights = (sinks.to(lse.dtype) - lse).exp_()
    along = (grad_out.to(lse.dtype) * out).sum(-1)
    return weights.mul_(along).sum(0).neg_().to(sinks.dtype)
