"""The process groups of a mesh: made once in a process, and shared by its Trainers.

A process group lives as long as its process, with its sockets and threads and, under NCCL, its
buffers on the device. A script that fits, validates and tests with a Trainer each must not add
groups each time, so they are kept here (:func:`communicators`) by what they depend on, until the
default process group is another one. Besides the axes of the mesh there are

* one group for each channel of pipeline messages (:func:`pipeline_groups`);
* context-parallel groups over several replicas, for DP-Merge (SlimPack; :class:`MergedGroups`): a
  document whose work exceeds a replica's share is spread over the context-parallel groups of an
  aligned power-of-two set of replicas, for its own micro-batch only. Parameters do not move: every
  rank of the set holds the same stage anyway, and gradients are summed over data and context alike.
  They are made at the start of the first step in which any replica needs one of that size: by every
  rank, for the set of that size that it is in. All ranks hold the whole plan and so agree on it.
  The members of the micro-batch alone would not do: with NCCL a new group is split off that of all
  ranks, which waits for every one of them.

Cost: nothing for a mesh that has been made before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.plan import StepPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Channel
from lightning_wlb.strategy.mesh import data_context, device_mesh, set_timeout

# torch 2.13 has a new name for it and deprecates the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather_from_all_ranks(mine: Tensor) -> Tensor:
    """Every rank's vector, [n] -> [world size, n] in rank order; collective.

    Without a process group, the own vector alone.
    """
    if not dist.is_initialized():
        return mine[None]
    everyone = mine.new_empty(dist.get_world_size() * len(mine))
    _all_gather(everyone, mine)
    return everyone.view(-1, len(mine))


def own_group(
    sets: Sequence[Sequence[int]], rank: int, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """The communicator of that one of several disjoint sets of ranks that holds ``rank``.

    Every rank makes one communicator, however many sets there are. ``dist.new_group`` for each set
    would take every rank through all of them: hundreds on a thousand ranks. Where the group of all
    ranks is bound to a device (NCCL), all are split off it in one call; else the members of a set
    make theirs among themselves.

    Args:
        sets: global ranks, the same on every rank; collective over all ranks.
        rank: this global rank.
        timeout: how long an operation may wait; None: torch's default.

    Returns:
        None where no set holds the rank.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    if device is not None and world._get_backend(device).supports_splitting:
        return dist.split_group(split_ranks=[list(ranks) for ranks in sets], timeout=timeout)
    for ranks in sets:
        if rank in ranks:
            return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return None


def pipeline_groups(at: Rank, timeout: timedelta | None) -> dict[Channel, dist.ProcessGroup]:
    """A communicator over this rank's pipeline for each channel of messages; collective.

    With virtual stages, messages also go from the last rank to the first and back.

    Args:
        at: where this rank stands.
        timeout: how long an operation may wait.
    """
    mesh = at.mesh
    if mesh.pipeline == 1:
        return {}
    pipelines = mesh.groups("pipeline").tolist()
    mine = {}
    for closes_ring in (False, True) if mesh.virtual_stages > 1 else (False,):
        for kind in (FORWARD, BACKWARD):
            group = own_group(pipelines, at.index, timeout)
            assert group is not None
            mine[Channel(kind, closes_ring)] = group
    return mine


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


@dataclass(frozen=True, eq=False)
class Communicators:
    """What the ranks of one mesh talk over.

    Args:
        mesh: with axes ``data``, ``pipeline``, ``context``, ``tensor``.
        channels: the communicator of each channel of pipeline messages; empty without a pipeline.
        merged: those over several replicas, made when a plan first asks.
    """

    mesh: DeviceMesh
    channels: Mapping[Channel, dist.ProcessGroup]
    merged: MergedGroups

    def set_timeout(self, timeout: timedelta) -> None:
        """Let any operation of the mesh wait so long, and those on the group of all ranks."""
        flat = data_context(self.mesh)
        groups = [*self.mesh.get_all_groups(), flat.get_group(), *self.channels.values()]
        set_timeout(timeout, *groups, dist.group.WORLD)
        self.merged.set_timeout(timeout)


# Those of the current default process group. Another one would leave them dead.
_made: dict[tuple[Mesh, str], Communicators] = {}
_world: dist.ProcessGroup | None = None


def communicators(at: Rank, device: torch.device, timeout: timedelta | None) -> Communicators:
    """The communicators of a mesh, made at the first call; collective over all ranks.

    Args:
        at: where this rank stands in it.
        device: of this rank.
        timeout: how long an operation may wait; None: torch's default, or what it was before.
    """
    global _world
    if _world is not dist.group.WORLD:
        _made.clear()
        _world = dist.group.WORLD
    key = (at.mesh, device.type)
    if key not in _made:
        mesh = device_mesh(at.mesh, device.type, timeout)
        channels = pipeline_groups(at, timeout)
        _connect(at, device, mesh, channels)
        _made[key] = Communicators(mesh, channels, MergedGroups(at, timeout))
    elif timeout is not None:
        _made[key].set_timeout(timeout)
    return _made[key]


def _connect(
    at: Rank,
    device: torch.device,
    mesh: DeviceMesh,
    channels: Mapping[Channel, dist.ProcessGroup],
) -> None:
    """Let the communicators of point-to-point messages connect before a step uses them.

    NCCL connects at first use. Where that is a batch of sends and receives, torch asks that *all*
    ranks of the group join it (``batch_isend_irecv``), and the tied ends of a pipeline are only two
    of them: so a collective comes first. Outside of a batch the two ranks of a message connect, and
    the sender waits for the receiver at that very call: two neighbours whose first messages cross
    would wait for each other, whatever the schedule proves of messages. So one message goes down
    each channel first, each rank receiving before it sends.
    """
    if at.mesh.pipeline == 1:
        return
    token = torch.zeros(1, device=device)
    dist.all_reduce(token, group=mesh["pipeline"].get_group())
    ranks = at.group("pipeline")
    for channel, group in channels.items():
        hops = [(ranks[-1], ranks[0])] if channel.closes_ring else list(pairwise(ranks))
        if channel.kind != FORWARD:
            hops = [(end, begin) for begin, end in reversed(hops)]
        for sender, receiver in hops:
            if at.index == sender:
                dist.send(token, receiver, group)
            elif at.index == receiver:
                dist.recv(token, sender, group)
