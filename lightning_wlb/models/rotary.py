"""Rotary embedding (Su et al., RoFormer): each pair of a head is rotated by its row's position.

Neighbouring pairs of a head are rotated, as in the original. Hugging Face's models rotate the two
halves instead, so that weights are interchangeable only with permuted query and key matrices.

Cost: a table of rows × head_dim / 2 for each micro-batch, computed once for all layers. Eagerly a
rotation is one complex product, with a copy in float32 before and one behind it for half types.
Products of cosines and sines by themselves are five times slower on a CPU, and read and write no
less on any device, unless a compiler makes one kernel of them, which reads and writes heads once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_wlb.models.config import TransformerConfig


def rotary_frequencies(positions: Tensor, config: TransformerConfig, dtype: torch.dtype) -> Tensor:
    """For each position and each pair of a head a complex number of modulus 1.

    Args:
        positions: int64 [rows].
        config: for ``head_dim`` and ``rope_theta``.
        dtype: of the hidden states.

    Returns:
        [rows, head_dim / 2], complex128 for float64 models, else complex64, which mixed precision
        leaves alone. Angles are computed in float64, because those of large positions need it.
    """
    assert config.head_dim is not None
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions[:, None] * config.rope_theta ** (-pairs / config.head_dim)
    freqs = torch.polar(torch.ones_like(angles), angles)
    return freqs if dtype == torch.float64 else freqs.to(torch.complex64)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of [rows, heads, head_dim].

    Args:
        heads: of any floating-point type, which the result has.
        table: ``torch.view_as_real`` of the frequencies, [rows, head_dim / 2, 2].
    """
    wide = heads.to(table.dtype)
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table)[:, None]).flatten(-2).to(heads)


def rotate_real(heads: Tensor, table: Tensor) -> Tensor:
    """:func:`rotate` in real numbers, for a compiler."""
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[:, None].unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return pairs.flatten(-2).to(heads)
