"""Attention sinks around any kernel that returns log-sum-exp and whose backward takes it.

A sink is a score without a value. With lse the log-sum-exp of a query's scores, s the sink of its
head and out the attention without it,

    lse' = log(exp lse + exp s),   out' = out · exp(lse - lse').

A kernel's backward recomputes probabilities as exp(score - lse) and subtracts grad · out from their
gradients. Given out' and lse' in place of its own it therefore yields exactly the gradients of
queries, keys and values with sinks. The sink's probability exp(s - lse') has no value, which leaves

    grad s = - Σ over rows of exp(s - lse') · (grad · out').

Cost: one pass over the output in forward, one over it and its gradient in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, [..., head_dim] and [...], with ``sinks`` that broadcast to [...].

    The output may come back in the wider dtype of ``lse``.
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - merged).exp_().unsqueeze(-1), merged


def gradient_of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[heads]; ``grad_out`` and ``out`` are [rows, heads, head_dim], ``lse`` is [rows, heads].

    Output and log-sum-exp are those of :func:`with_sinks`. Summed in the dtype of ``lse``.
    """
    weights = (sinks.to(lse.dtype) - lse).exp_()
    along = (grad_out.to(lse.dtype) * out).sum(-1)
    return weights.mul_(along).sum(0).neg_().to(sinks.dtype)
