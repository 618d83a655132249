"""What runs where forward and backward micro-batches differ (SlimPack §4.1.2).

An asymmetric plan groups the slices for backward otherwise than for forward. Without computing
anything twice, what one forward and one backward micro-batch have in common is the largest part
that can have an autograd graph of its own. So the executor runs these parts, the *units*, in place
of micro-batches: forward in the order of the forward micro-batches, backward in that of the
backward ones. A plan that is not asymmetric is its own. More and smaller kernels and messages than
micro-batches: at most the sum of both passes' numbers, less one, where pieces are cut in order.

Cost: linear in slices.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_wlb.plan import MicroBatch, ReplicaPlan
from lightning_wlb.sharding import Layout, layout


def units(
    replica: ReplicaPlan, context_parallel_size: int, tensor_parallel_size: int
) -> ReplicaPlan:
    """The plan as it is executed.

    Args:
        replica: any valid plan of a replica.
        context_parallel_size: ranks that share a micro-batch's tokens.
        tensor_parallel_size: every rank's rows are padded to a multiple of it.

    Returns:
        ``replica`` itself if it is not asymmetric. Else the same slices in units, which are the
        same in both passes; a unit has the sharding and the replicas of its forward micro-batch,
        and rows of its own.
    """
    if sorted(map(_members, replica.forward)) == sorted(map(_members, replica.backward)):
        return replica
    place = {
        index: number for number, group in enumerate(replica.backward) for index in group.slices
    }
    forward: list[MicroBatch] = []
    order: list[tuple[int, int, MicroBatch]] = []
    for at, group in enumerate(replica.forward):
        parts: dict[int, list[int]] = {}
        for index in group.slices:
            parts.setdefault(place[index], []).append(index)
        # The later in backward, the earlier its slices are in their pieces.
        for number in sorted(parts, reverse=True):
            unit = _unit(replica, group, parts[number], context_parallel_size, tensor_parallel_size)
            forward.append(unit)
            order.append((number, -at, unit))
    order.sort(key=lambda entry: entry[:2])
    return ReplicaPlan(replica.slices, tuple(forward), tuple(unit for _, _, unit in order))


def layout_of(
    replica: ReplicaPlan, group: MicroBatch, context_parallel_size: int, tensor_parallel_size: int
) -> Layout:
    """How a micro-batch lies on its context-parallel group."""
    return layout(
        group.sharding,
        [replica.slices[index].tokens for index in group.slices],
        context_parallel_size * len(group.replicas),
        tensor_parallel_size,
    )


def _members(group: MicroBatch) -> tuple[int, ...]:
    return tuple(sorted(group.slices))


def _unit(
    replica: ReplicaPlan,
    group: MicroBatch,
    members: list[int],
    context_parallel_size: int,
    tensor_parallel_size: int,
) -> MicroBatch:
    unit = replace(group, slices=tuple(members))
    arrangement = layout_of(replica, unit, context_parallel_size, tensor_parallel_size)
    return replace(unit, rows=arrangement.rows)
