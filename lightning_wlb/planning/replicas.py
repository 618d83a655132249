"""From the slices of each micro-batch to the plan of a replica.

Cost: linear in slices, and one choice of sharding for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, symmetric_backward

Shard = Callable[[Sequence[Slice], int], tuple[str, int]]
"""Slices of a micro-batch, replicas that share it -> sharding, rows per context-parallel rank."""


def whole(piece: Piece) -> Slice:
    """The slice that is all of a piece."""
    return Slice(piece.document, piece.origin, piece.origin, piece.stop)


def replica_plan(packs: Sequence[Sequence[Slice]], replica: int, shard: Shard) -> ReplicaPlan:
    """The plan of a replica that runs micro-batches in their order, and backward symmetrically.

    Args:
        packs: the slices of each micro-batch, in forward order.
        replica: its number.
        shard: how a micro-batch is laid out.
    """
    slices: list[Slice] = []
    forward = []
    for pack in packs:
        numbers = tuple(range(len(slices), len(slices) + len(pack)))
        sharding, rows = shard(pack, 1)
        slices += pack
        forward.append(MicroBatch(numbers, sharding, rows, (replica,)))
    return ReplicaPlan(tuple(slices), tuple(forward), symmetric_backward(slices, forward))


def asymmetric_replica_plan(
    forward: Sequence[Sequence[Slice]],
    backward: Sequence[Sequence[Slice]],
    replica: int,
    shard: Shard,
) -> ReplicaPlan:
    """The plan of a replica whose backward micro-batches group the slices otherwise.

    Args:
        forward: the slices of each micro-batch, in forward order.
        backward: the same slices, in micro-batches in backward order.
        replica: its number.
        shard: how a micro-batch is laid out.
    """
    slices = [part for pack in forward for part in pack]
    number = {part: index for index, part in enumerate(slices)}

    def groups(packs: Sequence[Sequence[Slice]]) -> tuple[MicroBatch, ...]:
        made = []
        for pack in packs:
            members = tuple(sorted(number[part] for part in pack))
            sharding, rows = shard([slices[index] for index in members], 1)
            made.append(MicroBatch(members, sharding, rows, (replica,)))
        return tuple(made)

    return ReplicaPlan(tuple(slices), groups(forward), groups(backward))
