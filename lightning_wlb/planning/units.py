"""What runs where forward and backward micro-batches differ (SlimPack §4.1.2).

An asymmetric plan groups the slices for backward otherwise than for forward. Without computing
anything twice, what one forward and one backward micro-batch have in common is the largest part
that can have an autograd graph of its own. So the executor runs these parts, the *units*, in place
of micro-batches: forward in the order of the forward micro-batches, backward in that of the
backward ones. A plan that is not asymmetric is its own. More and smaller kernels and messages than
micro-batches: at most the sum of both passes' numbers, less one, where pieces are cut in order.

A plan that recomputes (``ReplicaPlan.recompute``) runs whole micro-batches in both passes. Its
backward ones run the forward of their slices again, on the ranks on which their tokens are from
forward, from the stage inputs that the forward micro-batches keep. That takes the time of forward
once more, which activation checkpointing would take anyway, and holds no activations but those of
the backward that is running.

Cost: linear in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_wlb.attention.sharding import Layout, layout, regrouped
from lightning_wlb.plan import MicroBatch, ReplicaPlan


def units(
    replica: ReplicaPlan, context_parallel_size: int, tensor_parallel_size: int
) -> ReplicaPlan:
    """The plan as it is executed: in units, or with the rows of recomputed micro-batches.

    Args:
        replica: any valid plan of a replica.
        context_parallel_size: ranks that share a micro-batch's tokens.
        tensor_parallel_size: every rank's rows are padded to a multiple of it.

    Returns:
        ``replica`` itself if it is not asymmetric. Else the same slices in units, which are the
        same in both passes; a unit has the sharding and the replicas of its forward micro-batch,
        and rows of its own. Of a plan that recomputes, the plan with the rows of its backward
        micro-batches.
    """
    if replica.recompute:
        sizes = context_parallel_size, tensor_parallel_size
        layouts = [forward_layout(replica, group, *sizes) for group in replica.forward]
        backward = tuple(
            replace(group, rows=backward_layout(layouts, parts, tensor_parallel_size).rows)
            for group, parts in zip(replica.backward, forward_parts(replica), strict=True)
        )
        return replace(replica, backward=backward)
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


def forward_layout(
    replica: ReplicaPlan, group: MicroBatch, context_parallel_size: int, tensor_parallel_size: int
) -> Layout:
    """How a forward micro-batch lies on its context-parallel group."""
    return layout(
        group.sharding,
        [replica.slices[index].tokens for index in group.slices],
        context_parallel_size * len(group.replicas),
        tensor_parallel_size,
    )


def backward_layout(
    layouts: Sequence[Layout], parts: Sequence[tuple[int, int]], tensor_parallel_size: int
) -> Layout:
    """How a backward micro-batch that recomputes lies on the group: where forward has its tokens.

    Args:
        layouts: of the forward micro-batches.
        parts: its slices, see :func:`forward_parts`.
        tensor_parallel_size: the padded rows are a multiple of it.
    """
    sources = [(layouts[micro_batch], index) for micro_batch, index in parts]
    return regrouped(sources, tensor_parallel_size)


def forward_parts(replica: ReplicaPlan) -> list[list[tuple[int, int]]]:
    """For each backward micro-batch its slices, as (forward micro-batch, index in it)."""
    place = {
        number: (micro_batch, index)
        for micro_batch, group in enumerate(replica.forward)
        for index, number in enumerate(group.slices)
    }
    return [[place[number] for number in group.slices] for group in replica.backward]


def last_uses(replica: ReplicaPlan) -> list[list[int]]:
    """For each backward micro-batch that recomputes, the forward ones that no later one needs.

    What these have kept is free when it has run. A forward micro-batch without slices is in none.
    """
    last = {
        micro_batch: number
        for number, parts in enumerate(forward_parts(replica))
        for micro_batch, _ in parts
    }
    free: list[list[int]] = [[] for _ in replica.backward]
    for micro_batch, number in sorted(last.items()):
        free[number].append(micro_batch)
    return free


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
    arrangement = forward_layout(replica, unit, context_parallel_size, tensor_parallel_size)
    return replace(unit, rows=arrangement.rows)
