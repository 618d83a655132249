"""SlimPack: the same pieces every step, sliced into many micro-batches of equal work.

Nothing waits: every global batch is a step. Its pieces are dealt to the replicas by work, and each
replica's are cut into MicroPacks (:mod:`~lightning_wlb.planning.slicing`), ``micro_packs`` times N
over all replicas. On Generator A with four pipeline stages and N = 4 the simulated step is as
long as 1.19 times its work (1.76 for ``wlb``, 2.04 for ``original``), without delay.

The price: keys and values of cut pieces are kept until their last slice has run backward, and
micro-batches are smaller, which a device may run less efficiently.

Cost: see :mod:`~lightning_wlb.planning.slicing`.
"""

from __future__ import annotations

from typing import ClassVar

from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.packing.base import Groups, Mesh, Packer, Rules
from lightning_wlb.planning.replicas import Shard, replica_plan
from lightning_wlb.planning.slicing import PrefixWork, deal_pieces, share_packs, slice_pieces


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
        work = self._prefix_work
        pieces = [piece for group in groups for piece in group]
        dealt = deal_pieces(pieces, mesh.replicas, work)
        loads = [sum(work(piece.tokens) for piece in own) for own in dealt]
        return [
            self.replica(own, share, number, mesh, shard)
            for number, (own, share) in enumerate(zip(dealt, self.packs(loads), strict=True))
        ]

    def packs(self, loads: list[int]) -> list[int]:
        """MicroPacks of each replica, from its work."""
        return share_packs(loads, self.rules.micro_packs * self.rules.micro_batches)

    def replica(
        self, pieces: list[Piece], packs: int, number: int, mesh: Mesh, shard: Shard
    ) -> ReplicaPlan:
        """The plan of one replica."""
        return replica_plan(
            slice_pieces(pieces, packs, self.rules.cap, self._prefix_work), number, shard
        )
