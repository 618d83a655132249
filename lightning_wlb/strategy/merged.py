"""DP-Merge: context-parallel groups over several replicas, made when a plan first asks (SlimPack).

A document whose work exceeds a replica's share can be spread over the context-parallel groups of
an aligned power-of-two set of replicas, for its own micro-batch only. Parameters do not move: every
rank of the set holds the same stage anyway, and gradients are summed over data and context alike.

Communicators are made at the start of the first step in which any replica needs one of that size:
by every rank, for the set of that size that it is in. All ranks hold the whole plan and so agree on
it. The members of the micro-batch alone would not do: with NCCL a new communicator is split off the
one of all ranks, which waits for every one of them.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_wlb.mesh import Rank
from lightning_wlb.plan import StepPlan
from lightning_wlb.strategy.collectives import own_group
from lightning_wlb.strategy.mesh import set_timeout


class MergedGroups:
    """Communicators of one rank, by the number of replicas that share a micro-batch.

    Args:
        at: where the rank stands.
        timeout: how long a collective may wait for a rank.
    """

    def __init__(self, at: Rank, timeout: timedelta | None) -> None:
        self._at = at
        self._timeout = timeout
        self._groups: dict[int, dist.ProcessGroup] = {}

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations on these groups, and on those made later, wait so long."""
        self._timeout = timeout
        set_timeout(timeout, *self._groups.values())

    def prepare(self, plan: StepPlan) -> dict[int, dist.ProcessGroup]:
        """The communicators that a step needs; collective over all ranks.

        Returns:
            Number of replicas -> group of their context-parallel ranks on this stage, ordered by
            replica, then by context rank.
        """
        counts = {len(group.replicas) for replica in plan.replicas for group in replica.forward}
        for count in sorted(counts - {1} - set(self._groups)):
            group = own_group(self._sets(count), self._at.index, self._timeout)
            if group is not None:
                self._groups[count] = group
        return self._groups

    def _sets(self, count: int) -> list[list[int]]:
        """Global ranks of every aligned set of ``count`` replicas, on every stage."""
        mesh = self._at.mesh
        whole = mesh.data // count * count  # a set that is not whole cannot be asked for
        ranks = mesh.groups("data", "context").reshape(-1, mesh.data, mesh.context)
        sets: list[list[int]] = ranks[:, :whole].reshape(-1, count * mesh.context).tolist()
        return sets
