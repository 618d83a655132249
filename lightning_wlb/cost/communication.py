"""The cost of communication: time of messages between devices, and memory of process groups.

A transfer takes launch + hops · latency + bytes / bandwidth of its link, and a ramp: until the link
is full, a transfer gets half of the bandwidth (:meth:`.Link.ns`). This fits measured all-gathers of
NCCL, which take 36 to 76 µs at 8 MiB, while their bytes alone would take 11 to 20 µs.

Which link an axis of the mesh uses follows from the order of the ranks (:mod:`lightning_wlb.mesh`)
and from the devices per node: a process group whose ranks are all in one node uses the node's link;
any other crosses nodes. Every device has a network adapter of its own, so a group with m ranks in
each node drives m of them, up to the bandwidth of the node's link.

Collectives are rings: an all-gather or reduce-scatter of B bytes over n ranks takes n - 1 steps in
which each rank sends B/n bytes. On GPUs a reduce-scatter's last step adds B/n bytes to the received
ones: two reads and a write. Here messages overlap neither each other nor computation;
:mod:`~lightning_wlb.cost.overlap` models how products hide tensor- and context-parallel messages.

Do not use it for oversubscribed networks, where the bandwidth depends on other senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, alike


@dataclass(frozen=True)
class Communication:
    """Times of messages on one mesh; ValueError if it spans nodes and no network is known."""

    profile: Profile
    mesh: Mesh

    def __post_init__(self) -> None:
        links, per_node = self.profile.links, self.profile.devices_per_node
        if self.mesh.devices > per_node and "network" not in links:
            raise ValueError(
                f"The mesh {self.mesh} has {self.mesh.devices} devices, a node of the device"
                f" profile {self.profile.name!r} has {per_node}, and the profile has no link"
                " between nodes. Choose a smaller mesh, or add links.network (latency_ns,"
                " bytes_per_second) to the profile; or say how many devices a node has, if it has"
                " more (--devices-per-node of `lightning-wlb plan --mesh auto`)."
            )

    @cached_property
    def links(self) -> dict[str, Link]:
        """Links of collectives; ``"data"`` is data × context, over which parameters are sharded."""
        return {
            "tensor": self._of_groups("tensor"),
            "context": self._of_groups("context"),
            "data": self._of_groups("data", "context"),
        }

    @cached_property
    def pipeline(self) -> tuple[Link, ...]:
        """The link between ranks s and s + 1 for each s; the last rank's leads to rank 0."""
        node = self.mesh.groups("pipeline") // self.profile.devices_per_node
        crosses = (node != np.roll(node, -1, axis=1)).any(axis=0)
        links = self.profile.links
        return tuple(links["network" if cross else "node"] for cross in crosses)

    def collective_ns(self, axis: str, ranks: int, size: int, *, summed: bool = False) -> int:
        """An all-gather or reduce-scatter over a process group of ``ranks`` ranks.

        Args:
            axis: a key of :attr:`links`.
            size: bytes of the whole tensor, as after an all-gather or before a reduce-scatter.
            summed: whether it is a reduce-scatter.
        """
        return self.exchange_ns(axis, ranks, size * (ranks - 1) // ranks, summed=summed)

    def exchange_ns(self, axis: str, ranks: int, size: int, *, summed: bool = False) -> int:
        """An exchange in ``ranks - 1`` steps; the busiest rank sends or receives ``size`` bytes."""
        if ranks == 1 or size == 0:
            return 0
        result = self.links[axis].ns(ranks - 1, size)
        if summed and self.profile.device_type == "cuda":
            result += 3e9 * size / (ranks - 1) / self.profile.element_bytes_per_second
        return round(result)

    def message_ns(self, source: int, size: int) -> int:
        """A message of ``size`` bytes between pipeline stages ``source`` and ``source + 1``."""
        return round(self.pipeline[source % self.mesh.pipeline].ns(1, size))

    def _of_groups(self, *axes: str) -> Link:
        """The link of the slowest group, for which the step waits."""
        together, node = self._together(*axes), self.profile.links["node"]
        if together == self.mesh.groups(*axes).shape[1]:
            return node
        network = self.profile.links["network"]
        rate = together * network.bytes_per_second
        if together > 1:
            rate = min(rate, node.bytes_per_second)
        # One of so many hops leaves the node.
        latency = ((together - 1) * node.latency_ns + network.latency_ns) / together
        return replace(network, latency_ns=latency, bytes_per_second=rate)

    def _together(self, *axes: str) -> int:
        """The fewest ranks that any group has in any of its nodes."""
        node = np.sort(self.mesh.groups(*axes) // self.profile.devices_per_node, axis=1)
        # Over all groups in one row, a run of ranks ends where the node changes or a group ends.
        ends = np.append(node[:, :-1] != node[:, 1:], np.ones((len(node), 1), bool), axis=1)
        return int(np.diff(np.flatnonzero(ends), prepend=-1).min())


COMMUNICATOR_BYTES = 24 * (2**22 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)
"""GPU memory of a process group under NCCL once it has reduced or gathered: a ring receives into
buffers of three protocols on each channel (defaults in src/init.cc of NCCL 2.30); eight H100 have
24 channels (a log in NCCL's issue 1259). From the sources, not measured."""


def communicators(mesh: Mesh) -> int:
    """Process groups of a rank on a mesh, with the groups that shared micro-batches may add."""
    channels = 4 if mesh.virtual_stages > 1 else 2
    return (
        (mesh.devices > 1)
        + (mesh.tensor > 1)
        + (mesh.context > 1)
        + (mesh.data * mesh.context > 1)
        + (1 + channels) * (mesh.pipeline > 1)
        + mesh.data.bit_length()
        - 1
    )


def heterogeneous_communicators(strategies: Sequence[Sequence[Scheme]]) -> int:
    """The most process groups that heterogeneous pipelines add to a rank.

    Each strategy adds the groups of its pipelines and those that shared micro-batches may add; all
    strategies together add one group, over which parameters are exchanged. ``strategies`` has the
    pipelines of each strategy that steps may take. Cost: O(pipelines).
    """
    if not strategies:
        return 0
    counts = np.zeros(strategies[0][-1].ranks.stop, np.int64)
    for strategy in strategies:
        for numbers in alike(strategy).values():
            merged = len(numbers).bit_length() - 1
            for scheme in (strategy[number] for number in numbers):
                axes = 2 * (len(scheme.stages) > 1) + (scheme.context > 1) + (scheme.tensor > 1)
                counts[scheme.first : scheme.ranks.stop] += axes + merged
    return int(counts.max()) + 1
