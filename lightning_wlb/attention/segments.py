"""Attention segments as Python numbers, and cut into blocks, for kernels that loop over them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from lightning_wlb.attention.metadata import AttentionMetadata

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
    """A segment in blocks of ``size`` queries, which read no key that none of their queries sees.

    Each block is a segment of its own: its queries are the last of the keys that it reads.
    """
    first_query, queries, first_key, before = segment
    for start in range(0, queries, size):
        ahead = before + start
        missed = 0 if sliding_window is None else max(ahead - (sliding_window - 1), 0)
        yield first_query + start, min(size, queries - start), first_key + missed, ahead - missed
