"""Units of asymmetric plans: the parts that forward and backward micro-batches have in common.

The backward micro-batches of an asymmetric plan group slices in other ways than its forward ones
(SlimPack §4.1.2). If nothing is to be computed twice, an autograd graph can hold at most the slices
that one forward and one backward micro-batch have in common. So the executor runs these parts, the
*units*, in place of micro-batches: forward in the order of the forward micro-batches, backward in
that of the backward ones. A plan that is not asymmetric runs as it is.

Units are more and smaller than micro-batches, and so are their kernels and messages. Where pieces
are cut in order there are at most as many as forward and backward micro-batches together, less one.

Cost: linear in slices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lightning_wlb.plan import MicroBatch, ReplicaPlan
from lightning_wlb.sharding import Layout, layout


def units(
    replica: ReplicaPlan, context_parallel_size: int, tensor_parallel_size: int
) -> ReplicaPlan:
    """The plan of a replica as it is executed.

    Returns:
        ``replica`` itself if it is not asymmetric. Else the same slices in units, which are the
        same in both passes; a unit has the sharding and the replicas of its forward micro-batch,
        and its own number of rows on each of the context-parallel ranks, a multiple of the
        tensor-parallel size.
    """
    passes = [[each.slices for each in micro_batches] for _, micro_batches in replica.passes]
    if not set(passes[0]).issuperset(passes[1]):
        # Micro-batches with the same slices in another order are equal too.
        passes = [[tuple(sorted(each)) for each in keys] for keys in passes]
    if Counter(passes[0]) == Counter(passes[1]):
        return replica
    place = {
        index: number
        for number, micro_batch in enumerate(replica.backward)
        for index in micro_batch.slices
    }
    forward: list[MicroBatch] = []
    order: list[tuple[int, int, MicroBatch]] = []
    for at, micro_batch in enumerate(replica.forward):
        parts: dict[int, list[int]] = {}
        for index in micro_batch.slices:
            parts.setdefault(place[index], []).append(index)
        # Backward runs the slices of a piece in reverse, so the last part there is first here.
        for number in sorted(parts, reverse=True):
            unit = replace(micro_batch, slices=tuple(parts[number]))
            placed = layout_of(replica, unit, context_parallel_size, tensor_parallel_size)
            unit = replace(unit, rows=placed.rows)
            forward.append(unit)
            order.append((number, -at, unit))
    order.sort(key=lambda entry: entry[:2])
    return ReplicaPlan(replica.slices, tuple(forward), tuple(unit for _, _, unit in order))


def layout_of(
    replica: ReplicaPlan,
    micro_batch: MicroBatch,
    context_parallel_size: int,
    tensor_parallel_size: int,
) -> Layout:
    """How a micro-batch lies on its context-parallel group."""
    return layout(
        micro_batch.sharding,
        [replica.slices[index].tokens for index in micro_batch.slices],
        context_parallel_size * len(micro_batch.replicas),
        tensor_parallel_size,
    )
