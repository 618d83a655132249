"""Tokens in equal ranges, attention split by heads instead of queries (DeepSpeed Ulysses).

Each rank holds one range of the concatenated pieces. Around the kernel an all-to-all turns "all
heads of some rows" into "some heads of all rows" (:mod:`lightning_wlb.attention.ulysses`). Every
rank computes whole pieces, so that work is equal whatever the lengths are and no key is copied.

A rank sends rows · (ranks - 1) · (2 · heads / ranks + 2 · key/value heads of a rank) · head_dim
elements, whatever the pieces are; an exchange of keys sends at most rows · (ranks - 1) · 2 ·
kv_heads · head_dim. So this pays for models with about as many key/value heads as query heads and
for many ranks, and not where several query heads share a key/value head. Not for more ranks than
heads.

Slices of a piece, and micro-batches that several replicas share, exchange keys all the same: no
other rank's cache holds a rank's part of the heads.
"""

from __future__ import annotations

import numpy as np

from lightning_wlb.sharding.arrays import Integers, cut

HEADS = "heads"
"""The name of this sharding."""


def equal_ranges(lengths: Integers, ranks: int) -> Integers:
    """One range of the concatenated pieces for each rank, equal to within a token."""
    return cut(lengths, int(lengths.sum()) * np.arange(ranks + 1) // ranks)


def check_heads(
    heads: int, kv_heads: int, context_parallel_size: int, tensor_parallel_size: int = 1
) -> None:
    """Refuse heads that cannot be split over the context-parallel ranks.

    Args:
        heads: query heads, over all tensor-parallel ranks.
        kv_heads: key/value heads, over all tensor-parallel ranks.
        context_parallel_size: ranks that split the heads of a tensor-parallel rank.
        tensor_parallel_size: ranks that split the heads first.

    Raises:
        ValueError: if they do not divide; names the numbers and the remedy.
    """
    own, own_keys = heads // tensor_parallel_size, max(kv_heads // tensor_parallel_size, 1)
    size = context_parallel_size
    if own % size or (own_keys % size and size % own_keys):
        raise ValueError(
            f"sharding={HEADS!r} splits the {own} query and {own_keys} key/value heads of a"
            f" tensor-parallel rank over {size} context-parallel ranks, and they do not divide."
            f" Choose a context_parallel_size that divides {own} and divides {own_keys} or is a"
            " multiple of it, or another sharding, such as 'adaptive'."
        )
