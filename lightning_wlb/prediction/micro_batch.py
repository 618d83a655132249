"""What one micro-batch costs on its context-parallel group.

Each rank's attention segments go through the latency model, and a layer takes as long as the
group's slowest rank, which all wait for at the exchange of keys and values. Of slices, earlier keys
are attended to, put together with their own keys, and put together again in backward: gathered in a
group, copied on a single rank.

Cost: about 0.1 ms per context rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.plan import Slice
from lightning_wlb.prediction.step import MicroBatchCost
from lightning_wlb.sharding import Layout, traffic, uses_all_to_all


def micro_batch_cost(
    latency: LatencyModel,
    pieces: Sequence[Slice],
    placed: Layout,
    *,
    replicas: int = 1,
    kept: bool = False,
) -> MicroBatchCost:
    """The cost of a micro-batch of slices.

    Args:
        latency: of the model on the mesh.
        pieces: its slices.
        placed: how they lie on the context-parallel group, of all replicas that share it.
        replicas: how many share it.
        kept: whether a later micro-batch reads its keys.
    """
    before = np.array([piece.context for piece in pieces], dtype=np.int64)
    window = latency.shape.sliding_window
    # Keys that a query sees besides its own.
    reach = None if window is None else window - 1
    attention: list[tuple[int, int]] = []
    layer: list[tuple[int, int]] = []
    most_keys = 0
    sliced = kept or bool(before.any())
    earlier = int(np.minimum(before, reach).sum() if reach is not None else before.sum())
    if sliced:  # every rank sends all its rows, and those of earlier keys that it holds
        travelling = (placed.ranks - 1) * (placed.rows - (-earlier // placed.ranks))
    else:
        travelling = _travelling(placed, window)
    # A single rank copies keys where there are earlier ones.
    copies = placed.ranks == 1 and earlier > 0
    # Keys are put together again in backward; "full" counts that anyway.
    again = (copies or placed.ranks > 1) and latency.activation_checkpointing != "full"
    if placed.by_heads and not sliced:
        return _by_heads(latency, placed)
    _, document, start, stop = placed.table.T
    for first, end in pairwise(placed.first.tolist()):
        own = slice(first, end)
        queries = stop[own] - start[own]
        keys = stop[own] + before[document[own]]
        read = int((keys if reach is None else np.minimum(keys, queries + reach)).sum())
        most_keys = max(most_keys, read)
        passes = [
            latency.attention_ns(queries, keys, backward=backward) for backward in (False, True)
        ]
        attention.append((passes[0], passes[1]))
        gather = [0, 0]
        for backward in (False, True):
            if placed.ranks > 1:
                gather[backward] = latency.context_parallel_ns(
                    travelling, read, backward=backward, replicas=replicas
                )
            elif copies:
                gather[backward] = latency.slice_keys_ns(read, backward=backward)
        if again:
            gather[1] += gather[0]
        layer.append((passes[0] + gather[0], passes[1] + gather[1]))
    shared = _shared_ns(latency, placed.rows)
    return MicroBatchCost(
        rows=placed.rows,
        keys=most_keys,
        indexed=most_keys if placed.ranks > 1 else 0,
        kept_rows=placed.rows if kept else 0,
        attention_ns=_slowest(attention),
        mean_attention_ns=(
            sum(forward for forward, _ in attention) / len(attention),
            sum(backward for _, backward in attention) / len(attention),
        ),
        layer_ns=(_slowest(layer)[0] + shared[0], _slowest(layer)[1] + shared[1]),
    )


def _by_heads(latency: LatencyModel, placed: Layout) -> MicroBatchCost:
    """The cost of a micro-batch whose context-parallel ranks split the heads: alike on all."""
    ranks = placed.ranks
    lengths = np.array(placed.lengths, dtype=np.int64)
    forward, backward = (
        latency.attention_ns(lengths, lengths, backward=backward, head_split=ranks)
        for backward in (False, True)
    )
    exchange = [
        latency.head_parallel_ns(placed.rows, backward=backward) for backward in (False, True)
    ]
    shared = _shared_ns(latency, placed.rows)
    # As many keys as rows, of some of the heads; heads that several ranks read are copied.
    keys = placed.rows * max(ranks // latency.rank_kv_heads, 1)
    return MicroBatchCost(
        rows=placed.rows,
        keys=keys,
        indexed=0,
        kept_rows=0,
        attention_ns=(forward, backward),
        mean_attention_ns=(float(forward), float(backward)),
        layer_ns=(forward + exchange[0] + shared[0], backward + exchange[1] + shared[1]),
    )


def _shared_ns(latency: LatencyModel, rows: int) -> tuple[int, int]:
    """Everything of a layer but attention and its exchange, forward and backward."""
    forward, backward = (
        latency.linear_ns(rows, backward=backward)
        + latency.tensor_parallel_ns(rows, backward=backward)
        for backward in (False, True)
    )
    return forward, backward


def _travelling(placed: Layout, sliding_window: int | None) -> int:
    """Rows of keys that the busiest rank of the context-parallel group receives or sends."""
    if placed.ranks == 1 or not placed.shared:
        return 0
    moved = traffic(placed, sliding_window)
    if uses_all_to_all(placed, moved):
        return max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
    return (placed.ranks - 1) * placed.shared


def _slowest(ranks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The slowest rank's forward, and the slowest rank's backward."""
    return max(forward for forward, _ in ranks), max(backward for _, backward in ranks)
