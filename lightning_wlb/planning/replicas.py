"""From the slices of each micro-batch to the plan of a replica.

Cost: linear in slices, and one choice of sharding for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, symmetric_backward

Shard = Callable[[Sequence[Slice], int], tuple[str, int]]
"""Slices of a micro-batch, replicas that share it -> sharding, rows per context-parallel rank."""

Shared = tuple[Sequence[Slice], tuple[int, ...]]
"""Slices of a micro-batch, and the replicas that share it."""


def whole(piece: Piece) -> Slice:
    """The slice that is all of a piece."""
    return Slice(piece.document, piece.origin, piece.origin, piece.stop)


def replica_plan(
    packs: Sequence[Sequence[Slice]], replica: int, shard: Shard, shared: Sequence[Shared] = ()
) -> ReplicaPlan:
    """The plan of a replica that runs micro-batches in their order, and backward symmetrically.

    Args:
        packs: the slices of each micro-batch, in forward order.
        replica: its number.
        shard: how a micro-batch is laid out.
        shared: micro-batches of this and other replicas, which come first on all of them.
    """
    slices: list[Slice] = []
    forward = []
    for pack, members in [*shared, *((pack, (replica,)) for pack in packs)]:
        numbers = tuple(range(len(slices), len(slices) + len(pack)))
        sharding, rows = shard(pack, len(members))
        slices += pack
        forward.append(MicroBatch(numbers, sharding, rows, members))
    return ReplicaPlan(tuple(slices), tuple(forward), symmetric_backward(slices, forward))


def unsharded(slices: Sequence[Slice], replicas: int) -> tuple[str, int]:
    """In place of a :data:`Shard`, where the plan is only simulated: choosing one takes longer."""
    return "per_sequence", 0


def sharded(replica: ReplicaPlan, shard: Shard) -> ReplicaPlan:
    """The plan with every micro-batch laid out by ``shard``."""
    made: dict[tuple[int, ...], MicroBatch] = {}
    for group in (*replica.forward, *replica.backward):
        if group.slices not in made:
            sharding, rows = shard(replica.slices_of(group), len(group.replicas))
            made[group.slices] = MicroBatch(group.slices, sharding, rows, group.replicas)
    return ReplicaPlan(
        replica.slices,
        tuple(made[group.slices] for group in replica.forward),
        tuple(made[group.slices] for group in replica.backward),
    )


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
