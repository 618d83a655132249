"""The communicators of a mesh: made once in a process, and shared by its Trainers.

A process group lives as long as its process, with its sockets and threads and, under NCCL, its
buffers on the device. A script that fits, validates and tests with a Trainer each must not add
groups each time, so they are kept here by what they depend on, until the default process group is
another one.

Cost: nothing for a mesh that has been made before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.schedule.actions import FORWARD, Channel
from lightning_wlb.strategy.merged import MergedGroups
from lightning_wlb.strategy.mesh import data_context, device_mesh, set_timeout
from lightning_wlb.strategy.pipeline import pipeline_groups


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
