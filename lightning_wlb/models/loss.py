"""The sum of token losses, without holding all logits (rows × vocabulary) at once.

Logits of one long micro-batch are larger than everything else in the last stage (32K rows × 128K
words × 4 bytes = 16 GiB), so they exist for one chunk of rows at a time and backward recomputes
them. The forward keeps one number per row, the logarithm of the softmax denominator.

Under tensor parallelism each rank holds some rows of the output matrix ("vocabulary-parallel").
Per chunk the ranks exchange three numbers per row: the maximum, the sum of exponentials and the
logit of the target. Logits are never gathered. Every rank returns the same loss and calls backward
with the same gradient. The gradient of a rank's weight rows is then complete. The gradient of the
hidden states is this rank's words' part; the backward of ``gather_rows`` sums these parts.

Sums over chunks are in float32. On CUDA the products of half types are in float32 too, and are
added to the gradient of the output matrix in place, without a copy. That has been run only with
stand-ins for the two operators (tests/models/test_loss.py).

Cost: one extra product of hidden states and output matrix in backward, a third of the head's cost
without it. If rows × vocabulary is small, plain cross-entropy is faster. See also docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_wlb.cost.memory_model import chunk_rows
from lightning_wlb.data.batch import IGNORE
from lightning_wlb.distributed.process_groups import group_size

Function = Callable[..., Tensor]


def log_sum_exp(logits: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials, [rows]; overwrites the logits [rows, words]."""
    peak = logits.amax(-1)
    logits -= peak[:, None]
    return logits.exp_().sum(-1).log_().add_(peak)


def logits_gradient(
    logits: Tensor, log_sums: Tensor, column: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of cross-entropy by the logits, [rows, words]; overwrites the logits.

    Args:
        logits: [rows, words].
        log_sums: [rows], over all words of all ranks.
        column: [rows], the target's number among the words; -1 if it is not among them.
        scale: [rows], factors of the gradient.
    """
    logits -= log_sums[:, None]
    logits.exp_()
    here = (column >= 0).to(logits.dtype)
    logits.scatter_add_(1, column.clamp_min(0)[:, None], -here[:, None])
    logits *= scale[:, None]
    return logits.to(dtype)


def logits_gradient_at_once(
    logits: Tensor, log_sums: Tensor, column: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """:func:`logits_gradient` without in-place changes, for a compiler."""
    words = torch.arange(logits.shape[1], device=logits.device)
    target = (words == column[:, None]).to(logits.dtype)
    return (((logits - log_sums[:, None]).exp() - target) * scale[:, None]).to(dtype)


class Softmax(NamedTuple):
    """The element-wise work on logits: the functions above, or compiled ones that equal them."""

    log_sum_exp: Function = log_sum_exp
    logits_gradient: Function = logits_gradient


EAGER_SOFTMAX = Softmax()


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    softmax: Softmax = EAGER_SOFTMAX,
) -> Tensor:
    """Sum over rows of the cross-entropy of ``softmax(hidden @ weight.T)``.

    Args:
        hidden: [rows, dim], the same on every rank of ``group``.
        weight: [vocabulary, dim]; with a group this rank's rows, as many as any other's.
        labels: int64 [rows], global word numbers; ``IGNORE`` (-100) for a row without a target.
        group: the tensor-parallel group.

    Returns:
        0-dim, float32 (float64 for float64), alike on ranks; 0, as gradients, without targets.
    """
    group = group if group_size(group) > 1 else None
    return _ChunkedTokenLoss.apply(hidden, weight, labels, group, softmax)


def logits_loss(logits: Tensor, labels: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum over rows of the cross-entropy of logits that a model computes by its own code.

    Logits are [rows, vocabulary]; with a group this rank's columns, in rank order and equally many
    on each rank. Their gradient is complete on each rank. The rest is as in :func:`token_loss`.

    Cost: a gradient as large as the logits is kept until backward. Give few rows at a time
    (:func:`row_chunks`), under a checkpoint.
    """
    return _LogitsLoss.apply(logits, labels, group if group_size(group) > 1 else None)


def row_chunks(rows: int, weight: Tensor, times: int = 1) -> list[slice]:
    """Cuts ``rows`` rows into chunks, so that only one chunk's logits are in memory at a time.

    Logits are products with ``weight``, [words, dim]. A head that takes ``times`` as much memory
    for each logit as the plain loss gets chunks of so many times fewer rows.
    """
    size = max(chunk_rows(weight.shape[0], weight.device.type != "cpu") // times, 1)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _terms(
    logits: Tensor, labels: Tensor, group: ProcessGroup | None, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the logarithm of its sum of exponentials over all words.

    ``logits`` may be overwritten.
    """
    column = _column(labels, logits.shape[1], group)
    target = logits.gather(1, column.clamp_min(0)[:, None]).squeeze(1).masked_fill(column < 0, 0)
    log_sum = softmax.log_sum_exp(logits)
    if group is not None:
        peak = log_sum.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        sums = torch.stack([(log_sum - peak).exp(), target])
        dist.all_reduce(sums, group=group)
        log_sum, target = peak + sums[0].log(), sums[1]
    return (log_sum - target).masked_fill(labels == IGNORE, 0), log_sum


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup | None) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        terms, log_sum = _terms(logits.to(wide, copy=True), labels, group, EAGER_SOFTMAX)
        column = _column(labels, logits.shape[1], group)
        scale = (labels != IGNORE).to(wide)
        copy = logits.to(wide, copy=True)
        ctx.save_for_backward(logits_gradient(copy, log_sum, column, scale, logits.dtype))
        return terms.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return kept * gradient.to(kept.dtype), None, None


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: ProcessGroup | None,
        softmax: Softmax,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        log_sums = hidden.new_empty(hidden.shape[0], dtype=wide)
        for chunk in row_chunks(hidden.shape[0], weight):
            logits = _wide_product(hidden[chunk], weight.T, wide)
            terms, log_sums[chunk] = _terms(logits, labels[chunk], group, softmax)
            loss += terms.sum()
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, labels, log_sums)
        ctx.group, ctx.softmax = group, softmax
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sums = ctx.saved_tensors
        wide = log_sums.dtype
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks are summed in float32 even if the weight is bfloat16.
        weight_gradient = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for chunk in row_chunks(hidden.shape[0], weight):
            logits = _wide_product(hidden[chunk], weight.T, wide)
            column = _column(labels[chunk], weight.shape[0], ctx.group)
            scale = gradient.to(wide) * (labels[chunk] != IGNORE)
            narrow = ctx.softmax.logits_gradient(
                logits, log_sums[chunk], column, scale, hidden.dtype
            )
            if hidden_gradient is not None:
                hidden_gradient[chunk] = narrow @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, narrow.T, hidden[chunk])
            del logits, narrow
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _column(labels: Tensor, words: int, group: ProcessGroup | None) -> Tensor:
    """Column of each row's target among this rank's words, -1 if it is not among them."""
    column = labels if group is None else labels - dist.get_rank(group) * words
    return column.masked_fill((column < 0) | (column >= words), -1)


def _wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """``a @ b``, at least in float32."""
    if _has_wide_products(a) and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, which may be of a wider type."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _has_wide_products(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _has_wide_products(a: Tensor) -> bool:
    """Whether torch multiplies half types into float32 on the device (CUDA only)."""
    return a.is_cuda and torch.version.hip is None
