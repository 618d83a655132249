"""The plan of each replica: its micro-batches in order, and how each lies on the context ranks.

A packing decides which slices make a micro-batch; :func:`replica_plan` numbers them and writes the
replica's plan down. Packings put slices together without regard to context parallelism, so these
micro-batches have 0 rows. When the plan of a step is settled, :func:`laid_out` gives all of its
micro-batches a sharding and the rows of a rank (:mod:`lightning_wlb.sharding`) at once. Slices of
equal lengths after equally many tokens are laid out once, whatever documents they are of.

Cost: :func:`replica_plan` is linear in slices. :func:`laid_out` takes about 0.1 ms for a
micro-batch with context parallelism and an adaptive sharding, else a tenth of that. Plans that are
only compared do without it (:mod:`lightning_wlb.prediction.estimate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from lightning_wlb.cost.attention_tiles import SegmentCost
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice
from lightning_wlb.sharding import ADAPTIVE, Tokens, choose_each, layout

Shared = tuple[Sequence[Slice], tuple[int, ...]]
"""The slices of a micro-batch, and the replicas that share it."""


def whole_slice(piece: Piece) -> Slice:
    """The slice that is all of a piece."""
    return Slice(piece.document, piece.origin, piece.origin, piece.stop)


def replica_plan(
    packs: Sequence[Sequence[Slice]], replica: int, sharding: str, shared: Sequence[Shared] = ()
) -> ReplicaPlan:
    """The plan of a replica that runs micro-batches in their order, and backward symmetrically.

    Args:
        packs: the slices of each of the replica's own micro-batches, in forward order.
        replica: number of the replica.
        sharding: how ranks share each micro-batch; a name in :data:`.SHARDINGS`, or ``"adaptive"``.
        shared: micro-batches that replicas share, in order; this replica's run before its own.
    """
    slices: list[Slice] = []
    forward = []
    of_replica = [each for each in shared if replica in each[1]]
    for pack, members in [*of_replica, *((pack, (replica,)) for pack in packs)]:
        numbers = tuple(range(len(slices), len(slices) + len(pack)))
        slices += pack
        forward.append(MicroBatch(numbers, sharding, 0, members))
    return ReplicaPlan(tuple(slices), tuple(forward))


def laid_out(
    replicas: Sequence[ReplicaPlan], mesh: Mesh, sharding: str, kernel_cost: SegmentCost
) -> list[ReplicaPlan]:
    """The same replicas with the sharding and the rows of every micro-batch.

    Args:
        replicas: all replicas of a step; their shardings and rows are replaced.
        mesh: its context and tensor ranks share each micro-batch.
        sharding: as for :func:`replica_plan`; ``"adaptive"`` becomes, for each micro-batch, the
            sharding with the least predicted attention latency.
        kernel_cost: cost of attention segments, forward + backward, for adaptive sharding.
    """
    asked = [
        [
            Tokens(
                tuple([stop - start for _, _, start, stop in replica.slices_of(each)]),
                tuple([start - origin for _, origin, start, _ in replica.slices_of(each)]),
                mesh.context * len(each.replicas),
            )
            for each in replica.forward
        ]
        for replica in replicas
    ]
    tokens = list(dict.fromkeys(chain.from_iterable(asked)))
    if sharding == ADAPTIVE:
        found = choose_each(tokens, mesh.tensor, kernel_cost)
    else:
        found = [
            (sharding, layout(sharding, each.lengths, each.ranks, mesh.tensor).rows)
            for each in tokens
        ]
    lying = dict(zip(tokens, found, strict=True))
    return [
        ReplicaPlan(
            replica.slices,
            tuple(
                [
                    MicroBatch(each.slices, *lying[of_each], each.replicas, each.recompute)
                    for each, of_each in zip(replica.forward, own, strict=True)
                ]
            ),
        )
        for replica, own in zip(replicas, asked, strict=True)
    ]
