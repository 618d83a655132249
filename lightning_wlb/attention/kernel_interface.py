"""The signature of variable-length attention kernels, and the segments and sinks they share.

Every kernel has the signature of :class:`Kernel`; :mod:`.backends` chooses a kernel and checks its
arguments. :class:`AttentionOptions` has the options that may differ from layer to layer.

A *sink* is a score without a value. With lse the log-sum-exp of a query's scores, s the sink of its
head and out the attention without the sink,

    lse' = log(exp lse + exp s),   out' = out · exp(lse - lse').

A kernel's backward recomputes probabilities as exp(score - lse) and subtracts grad · out from their
gradients. Given out' and lse' instead of out and lse, it therefore yields exactly the gradients of
queries, keys and values with sinks. The sink's own probability exp(s - lse') gives

    grad s = - Σ over rows of exp(s - lse') · (grad · out').

Cost of sinks: one pass over the output in forward, and over output and gradient in backward.
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
    """Options of one layer's attention, besides its queries, keys and values.

    Args:
        scale: factor of the scores, the products of queries and keys; 1 / sqrt(head_dim) if None.
        sliding_window: most keys that a query sees, its own included; all if None.
        softcap: scaled scores s become softcap · tanh(s / softcap), as in Gemma 2; none if None.
        sinks: [heads], as in gpt-oss: for each query head a learned score without a value, which
            takes part in softmax, so that the weights of the keys add up to less than one. Their
            gradient is this rank's share: the owner of the parameter must sum the shares of a
            context-parallel group. None without sinks.

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
                f"softcap={self.softcap}: give a positive finite number, or None for no cap."
            )


PLAIN = AttentionOptions()
"""No window, the usual scale, no cap and no sinks."""


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
            options: options of the layer; sinks get their gradient too.

        Returns:
            [queries, heads, head_dim] in the dtype of q.

        Raises:
            ValueError: if the kernel lacks one of the options; names a backend that has it. Or as
                :func:`segments_of`, if the kernel uses it.
        """


Segment = tuple[int, int, int, int]
"""First query, number of queries, first key, number of keys before the first query's own key."""


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
        # An empty operand crashes the process inside torch's CPU kernel, so check every segment.
        if queries < 1 or before < 0:
            raise ValueError(
                f"attention segment with {queries} queries and {stop_key - first_key} keys: there"
                " must be at least one query and at least as many keys as queries."
            )
        yield first_query, queries, first_key, before


def blocks_of(segment: Segment, size: int, sliding_window: int | None) -> Iterator[Segment]:
    """Cut a segment into blocks of ``size`` queries, each with only the keys that its queries see.

    Each block is itself a segment: its queries are the last of the keys that it reads.
    """
    first_query, queries, first_key, before = segment
    for start in range(0, queries, size):
        ahead = before + start
        missed = 0 if sliding_window is None else max(ahead - (sliding_window - 1), 0)
        yield first_query + start, min(size, queries - start), first_key + missed, ahead - missed


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, [..., head_dim] and [...], with ``sinks`` that broadcast to [...].

    The output may have the wider dtype of ``lse``.
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - merged).exp_().unsqueeze(-1), merged


def gradient_of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, [heads], computed in the dtype of ``lse``.

    ``out`` and ``lse`` are the results of :func:`with_sinks`; ``grad_out`` and ``out`` are [rows,
    heads, head_dim], ``lse`` is [rows, heads].
    """
    weights = (sinks.to(lse.dtype) - lse).exp_()
    along = (grad_out.to(lse.dtype) * out).sum(-1)
    return weights.mul_(along).sum(0).neg_().to(sinks.dtype)
