"""SlimPack: the same pieces every step, sliced into many micro-batches of equal work.

Nothing waits: every global batch is a step. Its pieces are dealt to the replicas by work, and each
replica's are cut into MicroPacks (:mod:`~lightning_wlb.planning.slicing`), ``micro_packs`` times N
over all replicas. A piece with more work than a replica's capacity is shared by several
(:mod:`~lightning_wlb.planning.dp_merge`). On pipelines its simulated steps are much shorter than
those of ``wlb`` and ``original`` (``benchmarks/results/packing.md``).

With ``asymmetric=True`` the MicroPacks of the backward pass are cut apart from those of the forward
pass (:mod:`~lightning_wlb.planning.asymmetric`). This is an idea of SlimPack's that never was
faster in the simulations of this project, because such a plan runs in many small units.

The price of slices: keys and values of cut pieces are kept until their last slice has run backward,
and micro-batches are smaller, which a device may run less efficiently.

Cost: see :mod:`~lightning_wlb.planning.slicing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_wlb.arguments import flag, whole
from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.asymmetric import slice_pieces_asymmetric
from lightning_wlb.planning.dp_merge import merge_pieces, own_work, slice_shared
from lightning_wlb.planning.packing.base import MicroBatches, Packer, PackingOptions, Placement
from lightning_wlb.planning.replicas import asymmetric_replica_plan, replica_plan
from lightning_wlb.planning.slicing import share_packs, slice_pieces


@dataclass(frozen=True)
class SlimOptions(PackingOptions):
    """Options of ``slim``. They do not change what enters a step.

    Args:
        micro_packs: micro-batches that are made of a global batch, as a multiple of N. More fill
            the pipeline better, and make kernels smaller.
        asymmetric: whether the micro-batches of backward are cut apart from those of forward, for
            balance of each pass. Replicas then share no pieces.
    """

    micro_packs: int = 4
    asymmetric: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_packs", whole("micro_packs", self.micro_packs, 1))
        object.__setattr__(self, "asymmetric", flag("asymmetric", self.asymmetric))


class SlimPacker(Packer):
    """Slices, without delay."""

    Options: ClassVar[type[PackingOptions]] = SlimOptions
    arranges: ClassVar[bool] = True
    cap_percent: ClassVar[int] = 100

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """All pieces in one: there are no micro-batches before the mesh is known."""
        return [pieces], []

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """Pieces dealt to replicas by work, and the MicroPacks of each."""
        rules, mesh, work = self.rules, place.mesh, self.rules.work
        options: SlimOptions = rules.options
        (pieces,) = micro_batches
        # Virtual stages and asymmetric plans cannot run shared pieces.
        shares = mesh.virtual_stages == 1 and not options.asymmetric
        merged = merge_pieces(pieces, mesh.data, work.total, int(shares))
        packs = options.micro_packs * rules.micro_batches
        counts = share_packs(own_work(merged, work.total), packs, sum(merged.loads))
        if options.asymmetric:
            return [
                asymmetric_replica_plan(
                    *slice_pieces_asymmetric(own, count, rules.cap, work.forward, work.backward),
                    number,
                    place.shard,
                )
                for number, (own, count) in enumerate(zip(merged.own, counts, strict=True))
            ]
        shared = slice_shared(merged, packs, rules.cap, work.total)
        return [
            replica_plan(
                slice_pieces(own, count, rules.cap, work.total), number, place.shard, shared
            )
            for number, (own, count) in enumerate(zip(merged.own, counts, strict=True))
        ]
