"""What is computed between collectives, attention and the head's products, as pure functions.

:data:`EAGER` has them as they are. :meth:`Dense.compiled` has them compiled (:mod:`.compiled`):
inductor then makes one kernel of a norm, one of a rotation, one of SwiGLU's element-wise part, and
two of what the loss does to logits in half types. Backward computes cheap things again rather than
reading them, so that autograd saves less than the memory model counts: of SwiGLU three matrices in
place of four.

Not fused: what lies on two sides of a collective, as the residual sum and the norm behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_wlb.models.compiled import Compiled, Compiler, Function
from lightning_wlb.models.loss import PLAIN, Softmax, log_sum_exp, slope, slope_at_once
from lightning_wlb.models.rotary import rotate, rotate_real


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm x / sqrt(mean(x²) + eps) · weight along the last dim; [..., dim] -> [..., dim]."""
    return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def rotated_heads(hidden: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """Queries or keys: ``hidden`` [rows, dim] times ``weight``, by heads, rotated by ``table``.

    Args:
        hidden: [rows, dim].
        table: cosines and sines, [rows, head_dim / 2, 2].
        weight: [heads · head_dim, dim].

    Returns:
        [rows, heads, head_dim].
    """
    return rotate(_heads(hidden, table, weight), table)


def _rotated_heads_real(hidden: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    return rotate_real(_heads(hidden, table, weight), table)


def _heads(hidden: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    head_dim = 2 * table.shape[1]
    return F.linear(hidden, weight).unflatten(1, (weight.shape[0] // head_dim, head_dim))


def _log_sum_exp_at_once(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1)


def swiglu(hidden: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """w2(silu(w1 x) * w3 x); [rows, dim] -> [rows, dim]."""
    return F.linear(F.silu(F.linear(hidden, w1)) * F.linear(hidden, w3), w2)


@dataclass(frozen=True)
class Dense:
    """The functions above, or others that are equal to them."""

    rms_norm: Function = rms_norm
    rotated_heads: Function = rotated_heads
    swiglu: Function = swiglu
    softmax: Softmax = PLAIN

    @classmethod
    def compiled(cls) -> Dense:
        """Compiled for one model; one that cannot be runs as it is."""
        compiler = Compiler()
        return cls(
            Compiled(compiler, rms_norm),
            Compiled(compiler, _rotated_heads_real, 2, rotated_heads),
            Compiled(compiler, swiglu),
            Softmax(
                Compiled(compiler, _log_sum_exp_at_once, 1, log_sum_exp),
                Compiled(compiler, slope_at_once, 4, slope),
            ),
        )


EAGER = Dense()
"""The functions as they are."""
