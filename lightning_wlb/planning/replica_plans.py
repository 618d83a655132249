"""The plan of each replica: its micro-batches in order, and how each lies on the context ranks.

A packing decides which slices make a micro-batch; :func:`replica_plan` numbers them and writes the
replica's plan down. Packings put slices together without regard to context parallelism, so
micro-batches have no rows yet. When the plan of a step is settled, :func:`laid_out` gives all of
its micro-batches a sharding and the rows of a rank (:mod:`lightning_wlb.sharding`) at once. A
micro-batch that stands in both passes, or on several replicas, is laid out once.

Cost: :func:`replica_plan` is linear in slices. :func:`laid_out` takes about 0.1 ms for a
micro-batch where the sharding is adaptive and there is context parallelism, a tenth of it where
not. Leave it out for plans that are only compared: their times are estimated without it
(:mod:`lightning_wlb.prediction.estimate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_wlb.cost.attention_tiles import SegmentCost
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, symmetric_backward
from lightning_wlb.sharding import ADAPTIVE, HEADS, Tokens, choose_each, layout

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


_Key = tuple[tuple[Slice, ...], int]
"""The slices of a micro-batch, and how many replicas share it."""


def to_be_laid_out(sharding: str) -> Shard:
    """How packings name the sharding of micro-batches that are laid out later, with 0 rows.

    It is ``"adaptive"`` where a sharding will be chosen.
    """

    def named(slices: Sequence[Slice], replicas: int) -> tuple[str, int]:
        # Slices and shared micro-batches exchange keys, which "heads" does not spread evenly.
        chosen = sharding == HEADS and (replicas > 1 or any(part.context for part in slices))
        return ADAPTIVE if chosen else sharding, 0

    return named


def laid_out(
    replicas: Sequence[ReplicaPlan], mesh: Mesh, sharding: str, kernel_cost: SegmentCost
) -> list[ReplicaPlan]:
    """The same replicas with the sharding and the rows of every micro-batch.

    Args:
        replicas: of a step; shardings and rows that they have are replaced.
        mesh: of the ranks.
        sharding: of every micro-batch, a name in ``lightning_wlb.sharding.NAMES``, or
            ``"adaptive"``: for each micro-batch the one with the least predicted attention latency.
        kernel_cost: of attention segments, forward and backward together, by which an adaptive
            sharding is chosen.
    """
    keys: dict[_Key, None] = {}
    of_replicas = []
    for replica in replicas:
        own: dict[MicroBatch, _Key] = {}
        for each in (*replica.forward, *replica.backward):
            if each not in own:
                own[each] = replica.slices_of(each), len(each.replicas)
        keys.update(dict.fromkeys(own.values()))
        of_replicas.append(own)
    chosen = dict(zip(keys, _chosen(list(keys), mesh, sharding, kernel_cost), strict=True))
    result = []
    for replica, own in zip(replicas, of_replicas, strict=True):
        made = {}
        for each, key in own.items():
            name, rows = chosen[key]
            made[each] = replace(each, sharding=name, rows=rows)
        forward, backward = (
            tuple(made[each] for each in micro_batches) for _, micro_batches in replica.passes
        )
        result.append(ReplicaPlan(replica.slices, forward, backward))
    return result


def _chosen(
    keys: Sequence[_Key], mesh: Mesh, sharding: str, kernel_cost: SegmentCost
) -> list[tuple[str, int]]:
    """The sharding of each micro-batch, and its rows per context-parallel rank."""
    tokens = [
        Tokens(
            [part.tokens for part in slices],
            [part.context for part in slices],
            mesh.context * members,
        )
        for slices, members in keys
    ]
    if sharding == ADAPTIVE:
        return choose_each(tokens, mesh.tensor, kernel_cost)
    name = to_be_laid_out(sharding)
    result = [
        (sharding, layout(sharding, each.lengths, each.ranks, mesh.tensor).rows) for each in tokens
    ]
    chosen = [at for at, key in enumerate(keys) if name(*key)[0] == ADAPTIVE]
    made = choose_each([tokens[at] for at in chosen], mesh.tensor, kernel_cost)
    for at, each in zip(chosen, made, strict=True):
        result[at] = each
    return result
