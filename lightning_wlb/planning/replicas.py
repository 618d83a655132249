"""Which replica runs what: micro-batches dealt to replicas, and the plan of each replica.

Packings that keep pieces whole form micro-batches over all replicas at once (N is a global number)
and deal them as they are, by :func:`round_robin` or :func:`heaviest_first`. A replica may get more
of them than another and, where replicas outnumber micro-batches, none. Both keep the packing's
order within a replica. Packings that slice deal pieces first
(:mod:`~lightning_wlb.planning.dp_merge`) and make the micro-batches of each replica.

Cost: O(n·log R) after a sort, for n micro-batches and R replicas; a plan is linear in its slices,
with one choice of sharding for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, symmetric_backward
from lightning_wlb.planning.longest_first import deal

Deal = Callable[[Sequence[int], int], list[list[int]]]
"""Work of each micro-batch, number of replicas -> for each replica its micro-batches, ascending."""

Shard = Callable[[Sequence[Slice], int], tuple[str, int]]
"""Slices of a micro-batch, replicas that share it -> sharding, rows per context-parallel rank."""

Shared = tuple[Sequence[Slice], tuple[int, ...]]
"""Slices of a micro-batch, and the replicas that share it."""


def round_robin(works: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal micro-batches in their order, one to each replica in turn; see :data:`.Deal`."""
    return [list(range(replica, len(works), replicas)) for replica in range(replicas)]


def heaviest_first(works: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal micro-batches by descending work, each to the replica with the least work so far.

    Equal micro-batches go by index, equal replicas by number. See :data:`.Deal`.
    """
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    order = sorted(range(len(works)), key=lambda index: (-works[index], index))
    receivers = deal([works[index] for index in order], [0] * replicas)
    for index, replica in zip(order, receivers, strict=True):
        dealt[replica].append(index)
    return [sorted(indices) for indices in dealt]


def deal_micro_batches(
    micro_batches: Sequence[list[Piece]], replicas: int, work: Callable[[int], int], how: Deal
) -> list[list[list[Piece]]]:
    """Deal the micro-batches that are not empty, as they are.

    Args:
        micro_batches: pieces of each.
        replicas: number of replicas.
        work: cost of a piece from its tokens.
        how: :func:`round_robin` or :func:`heaviest_first`.

    Returns:
        For each replica its micro-batches, in the order in which they were given.
    """
    filled = [pieces for pieces in micro_batches if pieces]
    works = [sum(work(piece.tokens) for piece in pieces) for pieces in filled]
    return [[filled[index] for index in indices] for indices in how(works, replicas)]


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
        shared: micro-batches that replicas share, in their order; those of this replica come first.
    """
    slices: list[Slice] = []
    forward = []
    of_replica = [each for each in shared if replica in each[1]]
    for pack, members in [*of_replica, *((pack, (replica,)) for pack in packs)]:
        numbers = tuple(range(len(slices), len(slices) + len(pack)))
        slices += pack
        forward.append(MicroBatch(numbers, *shard(pack, len(members)), members))
    return ReplicaPlan(tuple(slices), tuple(forward), symmetric_backward(slices, forward))


def asymmetric_replica_plan(
    forward: Sequence[Sequence[Slice]],
    backward: Sequence[Sequence[Slice]],
    replica: int,
    shard: Shard,
) -> ReplicaPlan:
    """The plan of a replica whose backward micro-batches have other slices than the forward ones.

    Args:
        forward: the slices of each micro-batch, in forward order.
        backward: the same slices, in micro-batches in backward order.
        replica: its number.
        shard: how a micro-batch is laid out.
    """
    slices = [part for pack in forward for part in pack]
    number = {part: index for index, part in enumerate(slices)}

    def made(packs: Sequence[Sequence[Slice]]) -> tuple[MicroBatch, ...]:
        numbers = [tuple(sorted(number[part] for part in pack)) for pack in packs]
        return tuple(
            MicroBatch(each, *shard([slices[index] for index in each], 1), (replica,))
            for each in numbers
        )

    return ReplicaPlan(tuple(slices), made(forward), made(backward))


def unsharded(slices: Sequence[Slice], replicas: int) -> tuple[str, int]:
    """A :data:`Shard` for plans whose sharding does not matter: choosing one takes time."""
    return "per_sequence", 0
