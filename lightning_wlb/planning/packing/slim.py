"""SlimPack: the same pieces every step, sliced into many micro-batches of equal work.

Nothing waits: every global batch is a step. Its pieces are dealt to the replicas by work, and each
replica's are cut into MicroPacks (:mod:`~lightning_wlb.planning.slicing`), ``micro_packs`` times N
over all replicas. A piece with more work than a replica's capacity is shared by several
(:mod:`~lightning_wlb.planning.merging`). On Generator A with four pipeline stages and N = 4 the
simulated step is as long as 1.19 times its work (1.76 for ``wlb``, 2.04 for ``original``), without
delay.

The price: keys and values of cut pieces are kept until their last slice has run backward, and
micro-batches are smaller, which a device may run less efficiently.

Cost: see :mod:`~lightning_wlb.planning.slicing`.
"""

from __future__ import annotations

from typing import ClassVar

from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.merging import Merged, merge_pieces, shared_work
from lightning_wlb.planning.packing.base import Groups, Mesh, Packer, Rules
from lightning_wlb.planning.replicas import Shard, Shared, replica_plan
from lightning_wlb.planning.slicing import PrefixWork, share_packs, slice_pieces


class SlimPacker(Packer):
    """Slices, without delay."""

    cap_percent: ClassVar[int] = 100

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._prefix_work = PrefixWork.of(rules.work)

    def group(self, pieces: list[Piece], bins: int) -> tuple[Groups, list[Piece]]:
        """All of them: there are no micro-batches before the mesh is known."""
        return [pieces], []

    def replicas(self, groups: Groups, mesh: Mesh, shard: Shard) -> list[ReplicaPlan]:
        """Pieces dealt to replicas by work, and the MicroPacks of each."""
        pieces = [piece for group in groups for piece in group]
        # A piece above a replica's capacity is shared; virtual stages cannot.
        per_capacity = 1 if mesh.stages_per_rank == 1 else 0
        merged = merge_pieces(pieces, mesh.replicas, self._prefix_work, per_capacity)
        packs = self.rules.micro_packs * self.rules.micro_batches
        counts = share_packs(own_work(merged, self._prefix_work), packs, sum(merged.loads))
        shared = slice_shared(merged, packs, self.rules.cap, self._prefix_work)
        return [
            replica_plan(
                slice_pieces(own, count, self.rules.cap, self._prefix_work),
                number,
                shard,
                [each for each in shared if number in each[1]],
            )
            for number, (own, count) in enumerate(zip(merged.own, counts, strict=True))
        ]


def own_work(merged: Merged, work: PrefixWork) -> list[int]:
    """Work of each replica's own pieces."""
    return [sum(work(piece.tokens) for piece in pieces) for pieces in merged.own]


def slice_shared(merged: Merged, packs: int, cap: int, work: PrefixWork) -> list[Shared]:
    """The shared pieces in MicroPacks that take as long as each of ``packs`` over all replicas."""
    shared: list[Shared] = []
    for piece, members in merged.shared:
        part = shared_work(work(piece.tokens), len(members))
        (count,) = share_packs([part], packs, sum(merged.loads))
        shared += [(pack, members) for pack in slice_pieces([piece], count, cap, work)]
    return shared
