"""DP-Merge: context-parallel groups over several replicas, made when a plan first asks (SlimPack).

A document whose work exceeds a replica's share can be spread over the context-parallel groups of
an aligned power-of-two set of replicas, for its own micro-batch only. Parameters do not move: every
rank of the set holds the same stage anyway, and gradients are summed over data and context alike.

A set's communicator is made by its members alone, at the start of the first step that needs it.
Members make theirs in the same order, small sets first, so nobody waits in a circle.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.strategy.mesh import MeshSizes


class MergedGroups:
    """Communicators of one rank, by the number of replicas that share a micro-batch.

    Args:
        sizes: of the mesh.
        rank: this global rank.
        timeout: how long a collective may wait for a rank.
    """

    def __init__(self, sizes: MeshSizes, rank: int, timeout: timedelta | None) -> None:
        self._sizes = sizes
        self._rank = rank
        self._timeout = timeout
        self._groups: dict[int, dist.ProcessGroup] = {}

    def prepare(self, replica: ReplicaPlan) -> dict[int, dist.ProcessGroup]:
        """The communicators that a replica's plan needs; collective among the members of each.

        Returns:
            Number of replicas -> group of their context-parallel ranks on this stage, ordered by
            replica, then by context rank.
        """
        for count in sorted({len(group.replicas) for group in replica.forward} - {1}):
            if count not in self._groups:
                group = dist.new_group(
                    self._members(count), timeout=self._timeout, use_local_synchronization=True
                )
                assert group is not None
                self._groups[count] = group
        return self._groups

    def _members(self, count: int) -> list[int]:
        data, place, _, tensor = self._sizes.coordinate(self._rank)
        first = data - data % count
        return [
            self._sizes.rank(other, place, context, tensor)
            for other in range(first, first + count)
            for context in range(self._sizes.context)
        ]
