"""SlimPack: the same pieces every step, sliced into many micro-batches of equal work.

Nothing waits: every global batch is a step. Its pieces are dealt to the replicas by work, and each
replica's are cut into MicroPacks (:mod:`~lightning_wlb.planning.slicing`), ``micro_packs`` times N
over all replicas. A piece with more work than a replica's capacity is shared by several
(:mod:`~lightning_wlb.planning.dp_merge`). Its simulated steps on pipelines are much shorter than
those of ``wlb`` and ``original`` (``benchmarks/results/packing.md``). Price: keys and values of cut
pieces are kept until their last slice has run backward, and smaller micro-batches may be slower.

The paper also cuts backward into MicroPacks of its own (§4.1.2). Here forward and backward run the
same ones: plans of unlike packs were slower in every simulation (docs/design.md).

Cost: the slicing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_wlb.argument_checks import whole
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.planning.dp_merge import Dealing, most_sharers, own_work, slice_shared
from lightning_wlb.planning.packing.base import MicroBatches, Packer, PackingOptions
from lightning_wlb.planning.plan_scoring import Placement
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import share_packs, slice_pieces


@dataclass(frozen=True)
class SlimOptions(PackingOptions):
    """Options of ``slim``. They do not change what enters a step.

    Args:
        micro_packs: micro-batches of a global batch, as a multiple of N; more make kernels smaller.
    """

    micro_packs: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_packs", whole("micro_packs", self.micro_packs, 1))


class SlimPacker(Packer):
    """Slices, without delay."""

    Options: ClassVar[type[PackingOptions]] = SlimOptions
    arranges: ClassVar[bool] = True

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """Pieces dealt to replicas by work, and the MicroPacks of each."""
        rules, mesh, work = self.rules, place.mesh, self.rules.work.total
        (pieces,) = micro_batches
        # Virtual stages cannot run shared pieces.
        per_capacity, sharers = int(mesh.virtual_stages == 1), most_sharers(rules.work, mesh)
        merged = Dealing(pieces, mesh.data, work, per_capacity, sharers=sharers).merged
        packs = rules.options.micro_packs * rules.micro_batches
        counts = share_packs(own_work(merged, work), packs, sum(merged.loads))
        shared = slice_shared(merged, packs, rules.cap, work)
        return [
            replica_plan(slice_pieces(own, count, rules.cap, work), number, place.sharding, shared)
            for number, (own, count) in enumerate(zip(merged.own, counts, strict=True))
        ]
