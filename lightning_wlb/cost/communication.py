"""How long messages between devices take: latency + bytes / bandwidth, over the right link.

Which link an axis of the mesh uses follows from the order of the ranks (data outermost, then
pipeline, context, and tensor innermost) and from the devices per node: a group whose ranks all
lie in one node uses the node's link; any other crosses nodes. Every device has a network adapter
of its own, so a group with m ranks in each node drives m of them, up to the node's link.

Collectives are rings: an all-gather or reduce-scatter of B bytes over n ranks takes n - 1 steps
in which each rank sends B/n bytes. Messages are not overlapped with computation, nor with each
other: the executor overlaps neither. (Keys travel while the query projection runs, a part of the
exchange that is charged here all the same.)

Cost: a few integer operations per call; setting up enumerates the ranks once. Not for
oversubscribed networks, where the bandwidth depends on who else sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.mesh import Mesh


@dataclass(frozen=True)
class Communication:
    """Times of messages on one mesh of devices.

    Raises:
        ValueError: if the mesh spans nodes and the profile knows no network.
    """

    profile: Profile
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.mesh.devices > self.profile.devices_per_node and not self._network:
            raise ValueError(
                f"The mesh {self.mesh} has {self.mesh.devices} devices, a node of the device"
                f" profile {self.profile.name!r} has {self.profile.devices_per_node}, and the"
                " profile has no link between nodes. Choose a smaller mesh, or add links.network"
                " (latency_ns, bytes_per_second) to the profile."
            )

    @cached_property
    def tensor(self) -> Link:
        """The link of tensor-parallel collectives."""
        return self._of_groups("tensor")

    @cached_property
    def context(self) -> Link:
        """The link of context-parallel collectives."""
        return self._of_groups("context")

    @cached_property
    def data(self) -> Link:
        """The link of the collectives that parameters are sharded over: data and context."""
        return self._of_groups("data", "context")

    @cached_property
    def pipeline(self) -> tuple[Link, ...]:
        """The link between stages s and s + 1, for each s; the last stage's leads to stage 0."""
        node = self.mesh.groups("pipeline") // self.profile.devices_per_node
        crosses = (node != np.roll(node, -1, axis=1)).any(axis=0)
        return tuple(self._network[0] if cross else self._node for cross in crosses)

    def collective_ns(self, axis: str, ranks: int, size: int) -> int:
        """An all-gather or reduce-scatter.

        Args:
            axis: ``"tensor"``, ``"context"`` or ``"data"``.
            ranks: of the group.
            size: bytes of the whole, what every rank has in the end (or had in the beginning).
        """
        return self.exchange_ns(axis, ranks, size * (ranks - 1) // ranks)

    def exchange_ns(self, axis: str, ranks: int, size: int) -> int:
        """An exchange in which the busiest rank sends or receives ``size`` bytes, in n - 1 steps.

        Args:
            axis: as for :meth:`collective_ns`.
            ranks: of the group.
            size: bytes.
        """
        if ranks == 1 or size == 0:
            return 0
        link: Link = getattr(self, axis)
        return round((ranks - 1) * link.latency_ns + size * 1e9 / link.bytes_per_second)

    def all_to_all_ns(self, size: int) -> int:
        """Every context-parallel rank sends ``size`` bytes, in equal parts to all the others.

        Parts for other nodes go through the rank's own network adapter, at the same time as parts
        for its own node through the node's link. No ring shares the adapters of a node here.
        """
        ranks = self.mesh.context
        if ranks == 1 or size == 0:
            return 0
        together = self._together("context")
        if together == ranks:
            return self.exchange_ns("context", ranks, size)
        network = self._network[0]
        outside = size * (ranks - together) // (ranks - 1)
        seconds = max(
            outside / network.bytes_per_second, (size - outside) / self._node.bytes_per_second
        )
        return round((ranks - 1) * network.latency_ns + seconds * 1e9)

    def message_ns(self, source: int, size: int) -> int:
        """A message of ``size`` bytes between pipeline stages ``source`` and ``source + 1``."""
        link = self.pipeline[source % self.mesh.pipeline]
        return round(link.latency_ns + size * 1e9 / link.bytes_per_second)

    @property
    def _node(self) -> Link:
        return self.profile.links["node"]

    @property
    def _network(self) -> list[Link]:
        return [self.profile.links["network"]] if "network" in self.profile.links else []

    def _of_groups(self, *axes: str) -> Link:
        """The slowest group decides: the step waits for it."""
        together = self._together(*axes)
        if together == self.mesh.groups(*axes).shape[1]:
            return self._node
        network = self._network[0]
        rate = together * network.bytes_per_second
        if together > 1:
            rate = min(rate, self._node.bytes_per_second)
        return Link(network.latency_ns, rate)

    def _together(self, *axes: str) -> int:
        """Fewest ranks of a group that lie in one node, over its nodes and all groups."""
        node = self.mesh.groups(*axes) // self.profile.devices_per_node
        return min(int(np.unique(row, return_counts=True)[1].min()) for row in node)
