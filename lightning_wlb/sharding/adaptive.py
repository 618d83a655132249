"""Chooses the sharding with the least predicted latency for a micro-batch (WLB-LLM §5.3).

Ranks wait for each other, so a sharding takes as long as its slowest rank, whose latency is the sum
of the predicted kernel costs of its segments. The paper chooses between two shardings by a device
profile; here any segment cost can be used.

Candidates are tried in order, beginning with those that send least. The first one within 2 % of the
ideal (whole pieces on equally loaded ranks) ends the search: no prediction is better than that.

Only the cutting is done micro-batch by micro-batch; the rest is array arithmetic over all chunks.

Cost: about 50 µs per candidate. For the same sharding in all micro-batches, name it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_wlb.cost.attention_tiles import SegmentCost, reference_kernel_cost
from lightning_wlb.sharding.integer_ranges import Integers, offsets
from lightning_wlb.sharding.layout import Layout, chunks_of_each, layout

ADAPTIVE = "adaptive"
"""The name by which a user asks for this choice."""

CANDIDATES = ("hybrid", "per_document_contiguous", "per_sequence", "ptrr")
"""Every sharding but ``per_document``, whose contiguous form has better tiles.
``benchmarks/candidate_shardings.py`` measures what each adds to the others."""

IDEAL_PERCENT = 102
"""Predicted latency at which the search for a sharding ends, in percent of the ideal."""


class Tokens(NamedTuple):
    """The properties of a micro-batch by which its sharding is chosen."""

    lengths: Sequence[int]  #: tokens of each piece, at least 1
    #: earlier tokens that each slice attends to, 0 for a whole piece. Shardings do not depend on
    #: them, but the choice among shardings does
    contexts: Sequence[int]
    ranks: int  #: size of the micro-batch's context-parallel group


def choose(
    lengths: Sequence[int],
    context_parallel_size: int,
    tensor_parallel_size: int,
    cost: SegmentCost = reference_kernel_cost,
    candidates: Sequence[str] = CANDIDATES,
    contexts: Sequence[int] | None = None,
) -> tuple[str, Layout]:
    """The sharding of one micro-batch and its layout; see :func:`choose_each`, :func:`.layout`."""
    before = [0] * len(lengths) if contexts is None else contexts
    ((name, _),) = choose_each(
        [Tokens(lengths, before, context_parallel_size)], tensor_parallel_size, cost, candidates
    )
    return name, layout(name, lengths, context_parallel_size, tensor_parallel_size)


def choose_each(
    micro_batches: Sequence[Tokens],
    tensor_parallel_size: int,
    cost: SegmentCost = reference_kernel_cost,
    candidates: Sequence[str] = CANDIDATES,
) -> list[tuple[str, int]]:
    """The sharding with the least predicted latency for each micro-batch; in a tie the first tried.

    Args:
        tensor_parallel_size: the padded rows are a multiple of it.
        cost: what segments cost, forward and backward together.
        candidates: names in :data:`.SHARDINGS`, at least one, in the order in which to try them.

    Returns:
        The name of each micro-batch's sharding, and the rows of its ranks after padding.
    """
    best = [(candidates[0], sum(each.lengths)) for each in micro_batches]
    least: dict[int, int] = {}
    alike: dict[int, list[int]] = {}
    for at, each in enumerate(micro_batches):
        # A single rank has all tokens whatever the sharding; an empty micro-batch has none.
        if each.ranks > 1 and len(each.lengths):
            alike.setdefault(each.ranks, []).append(at)
    for ranks, left in alike.items():
        for name in candidates:
            found = _latencies(name, [micro_batches[at] for at in left], ranks, cost)
            going_on = []
            for at, (latency, rows, ideal) in zip(left, found, strict=True):
                if at not in least or latency < least[at]:
                    least[at], best[at] = latency, (name, rows)
                if 100 * ranks * latency > IDEAL_PERCENT * ideal:
                    going_on.append(at)
            left = going_on
    return [(name, -(-rows // tensor_parallel_size) * tensor_parallel_size) for name, rows in best]


def _latencies(
    name: str, micro_batches: Sequence[Tokens], ranks: int, cost: SegmentCost
) -> list[tuple[int, int, int]]:
    """(latency, most rows of a rank, work of whole pieces) of each micro-batch under a sharding."""
    if not micro_batches:
        return []
    sizes = [np.array(each.lengths, dtype=np.int64) for each in micro_batches]
    first_piece = offsets(np.array([len(each) for each in sizes]))
    lengths = np.concatenate(sizes)
    contexts = np.concatenate([each.contexts for each in micro_batches]).astype(np.int64)
    table, first = chunks_of_each(name, sizes, ranks)
    _, piece, start, stop = table.T

    def slowest(of_chunks: Integers) -> list[int]:
        of_ranks = np.diff(offsets(of_chunks)[first])
        most: list[int] = of_ranks.reshape(-1, ranks).max(axis=1).tolist()
        return most

    ideal = np.diff(offsets(cost(lengths, lengths + contexts))[first_piece])
    latency = slowest(cost(stop - start, stop + contexts[piece]))
    return list(zip(latency, slowest(stop - start), ideal.tolist(), strict=True))
