"""Process groups: made once in a process, and shared by its Trainers.

A process group lives as long as its process, with its sockets and threads and, under NCCL, its
buffers on the device. A script that fits, validates and tests with a Trainer each must not add
groups each time. So :func:`kept` keeps them, by mesh or pipelines and kind of device, until the
default process group is replaced. All groups have one time-out (:func:`mesh_groups`).
Besides the axes of the mesh there are groups for the channels of pipeline messages
(:func:`pipeline_groups`) and for replicas that share a micro-batch (:class:`MergedGroups`).

Cost: nothing for a mesh or pipelines whose groups have been made before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_wlb.distributed.collectives import all_gather
from lightning_wlb.mesh import AXES, Mesh, Rank
from lightning_wlb.plan import StepPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Channel


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one rank; None in place of a group of one rank."""

    context: ProcessGroup | None = None  #: ranks that share the rows of a micro-batch
    tensor: ProcessGroup | None = None  #: ranks that share every parameter
    #: number of data-parallel replicas that share a micro-batch (DP-Merge) -> the ranks of all of
    #: these replicas that share its rows
    merged: Mapping[int, ProcessGroup] = field(default_factory=dict)
    #: (rows of a micro-batch on a rank, tensor-parallel ranks) -> chunks in which these rows are
    #: sent while matrix products run; None: products wait for messages
    chunks: Callable[[int, int], int] | None = None

    def of_rows(self, replicas: int) -> ProcessGroup | None:
        """The ranks that share the rows of a micro-batch of ``replicas`` replicas."""
        return self.context if replicas == 1 else self.merged[replicas]


NO_GROUPS = ProcessGroups()
"""The process groups of a rank that shares neither rows nor parameters with another."""


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in a group; 1 if None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """Index of this rank within a group; 0 if None."""
    return 0 if group is None else dist.get_rank(group)


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The four-axis DeviceMesh on ``"cuda"`` or ``"cpu"``; collective over all ranks."""
    made = init_device_mesh(device_type, mesh.shape, mesh_dim_names=AXES)
    axes = [*made.get_all_groups(), data_context(made).get_group()]
    # torch gives them its own default time-out, whatever that of the default group is.
    _set_timeout(*axes)
    _groups.extend(axes)
    return made


def data_context(mesh: DeviceMesh) -> DeviceMesh:
    """The data and context axes as one: parameters are sharded and gradients summed over it.

    The first call for a mesh is collective; :func:`device_mesh` makes it.
    """
    return mesh["data", "context"]._flatten("data_context")


@dataclass(frozen=True, eq=False)
class MeshGroups:
    """The process groups of one rank in a mesh."""

    mesh: DeviceMesh
    #: the group of each channel of pipeline messages; empty without a pipeline
    channels: Mapping[Channel, ProcessGroup]
    merged: MergedGroups  #: groups over several replicas, made when a plan first needs them
    #: the ranks that share the parameters; it carries their gathers and sums only
    parameters: ProcessGroup

    @property
    def pipeline(self) -> ProcessGroup | None:
        """The ranks that hold the stages of a replica; None for one rank."""
        return self._along("pipeline")

    def of_step(self, plan: StepPlan) -> ProcessGroups:
        """The groups that a model's forward uses in a step; collective over all ranks."""
        return ProcessGroups(
            self._along("context"), self._along("tensor"), self.merged.prepare(plan)
        )

    def _along(self, axis: str) -> ProcessGroup | None:
        return self.mesh.get_group(axis) if self.mesh.size(AXES.index(axis)) > 1 else None


_T = TypeVar("_T")

# Made under the default process group _world; under another default group they are invalid.
_made: dict[Hashable, Any] = {}
_groups: list[ProcessGroup] = []
_world: ProcessGroup | None = None
_timeout: timedelta | None = None  # of operations on all groups; None: torch's default


def kept(key: Hashable, make: Callable[[], _T]) -> _T:
    """What ``make`` returned at the first call with ``key``; collective over all ranks."""
    global _world
    if _world is not dist.group.WORLD:
        _made.clear()
        _groups.clear()
        _world = dist.group.WORLD
    if key not in _made:
        _made[key] = make()
    return _made[key]


def _set_timeout(*groups: ProcessGroup | None) -> None:
    if _timeout is not None:
        for group in groups:
            _set_pg_timeout(_timeout, group)


def mesh_groups(rank: Rank, device: torch.device, timeout: timedelta | None) -> MeshGroups:
    """The process groups of a mesh, made at the first call; collective over all ranks.

    From now on operations on all groups of this process, the default group included, may wait for
    ``timeout``; None: torch's default, or the time-out that was set before.
    """
    global _timeout
    _timeout = timeout

    def make() -> MeshGroups:
        mesh = device_mesh(rank.mesh, device.type)
        channels = pipeline_groups(rank)
        if channels:
            # The two ends of a pipeline exchange tied gradients by batch_isend_irecv, which torch
            # allows as a group's first operation only if all of its ranks join.
            dist.all_reduce(torch.zeros(1, device=device), group=mesh["pipeline"].get_group())
            connect_channels(rank.group("pipeline"), rank.index, device, channels)
        ranks = np.arange(rank.mesh.devices).reshape(rank.mesh.shape)
        merged = MergedGroups([ranks], rank.index)
        return MeshGroups(mesh, channels, merged, _parameter_group(rank, mesh))

    # With virtual stages, whatever their number, the same groups for the ring are needed.
    mesh = replace(rank.mesh, virtual_stages=min(rank.mesh.virtual_stages, 2))
    groups = kept((mesh, device.type), make)
    _set_timeout(*_groups, dist.group.WORLD)
    return groups


def _parameter_group(rank: Rank, mesh: DeviceMesh) -> ProcessGroup:
    """The ranks that share this rank's parameters, in a group of their own.

    For an axis over all ranks torch takes the default group, in which the keys of context-parallel
    attention would wait behind all parameters of the step.
    """
    group = data_context(mesh).get_group()
    if group is dist.group.WORLD and group.size() > 1:
        own = own_group([list(range(group.size()))], rank.index)
        assert own is not None
        return own
    return group


def connect_channels(
    ranks: Sequence[int],
    global_rank: int,
    device: torch.device,
    channels: Mapping[Channel, ProcessGroup],
) -> None:
    """Connect neighbours in a pipeline before a step sends messages; collective over its ranks.

    NCCL connects at first use, and in that call the sender waits for the receiver. Two neighbours
    whose first messages cross would wait for each other. So each channel carries a message now,
    which a rank receives before it sends. ``ranks`` has the global rank of each pipeline rank.
    """
    for channel, group in channels.items():
        hops = [(ranks[-1], ranks[0])] if channel.closes_ring else list(pairwise(ranks))
        if channel.kind != FORWARD:
            hops = [(end, begin) for begin, end in reversed(hops)]
        token = torch.zeros(1, device=message_device(device, group))
        for sender, receiver in hops:
            if global_rank == sender:
                dist.send(token, receiver, group)
            elif global_rank == receiver:
                dist.recv(token, sender, group)


def pipeline_groups(rank: Rank) -> dict[Channel, ProcessGroup]:
    """A process group over this rank's pipeline for each channel of messages; collective.

    With virtual stages, messages also go from the last rank to the first and back.
    """
    mesh = rank.mesh
    if mesh.pipeline == 1:
        return {}
    pipelines = mesh.groups("pipeline").tolist()
    groups = {}
    for closes_ring in (False, True) if mesh.virtual_stages > 1 else (False,):
        for kind in (FORWARD, BACKWARD):
            group = own_group(pipelines, rank.index)
            assert group is not None
            groups[Channel(kind, closes_ring)] = group
    return groups


class MergedGroups:
    """Context-parallel groups over several replicas, for DP-Merge (SlimPack).

    A document whose work exceeds a replica's share is spread over the context-parallel groups of an
    aligned power-of-two set of replicas, for its own micro-batch only. Parameters do not move:
    every rank of the set holds the same stage, and gradients are summed over data and context
    alike. Equal heterogeneous pipelines share micro-batches in the same way.

    All ranks make the groups over sets of one size at the start of the first step in which any
    replica needs one; the plan tells them which. The ranks of one micro-batch cannot make theirs
    alone: with NCCL a new group is split off the default group, which waits for all its ranks.

    ``alike``: each set of equal replicas as int64 [replicas, stages, context, tensor] global ranks.
    """

    def __init__(self, alike: Sequence[NDArray[np.int64]], global_rank: int) -> None:
        self._alike, self._rank = alike, global_rank
        self._groups: dict[int, ProcessGroup] = {}
        self._made: set[int] = set()  # set sizes; also those for which this rank is in no set

    def prepare(self, plan: StepPlan) -> dict[int, ProcessGroup]:
        """Make the groups that a step needs and that are not there yet; collective over all ranks.

        Returns:
            All groups of this rank: number of replicas -> their context-parallel ranks at this
            stage and tensor place, ordered by replica.
        """
        counts = {len(each.replicas) for replica in plan.replicas for each in replica.forward}
        for count in sorted(counts - {1} - self._made):
            self._made.add(count)
            sets: list[list[int]] = []
            for ranks in self._alike:
                _, stages, context, tensor = ranks.shape
                whole = ranks[: len(ranks) // count * count]  # no plan merges the rest
                every = whole.reshape(-1, count, stages, context, tensor)
                sets += every.transpose(0, 2, 4, 1, 3).reshape(-1, count * context).tolist()
            group = own_group(sets, self._rank)
            if group is not None:
                self._groups[count] = group
        return self._groups


def own_group(sets: Sequence[Sequence[int]], global_rank: int) -> ProcessGroup | None:
    """The process group of the set of ranks that holds ``global_rank``; None if no set does.

    Collective over all ranks, which give the same disjoint sets of global ranks. Every rank makes
    one group, however many sets there are: with ``dist.new_group`` for each set, every rank would
    call it for all sets, hundreds on a thousand ranks. If the default group is bound to a device
    (NCCL), all groups are split off it in one call, which ranks in no set must make too (read in
    torch 2.13); otherwise the members of a set make their group among themselves.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    if device is not None and world._get_backend(device).supports_splitting:
        made = dist.split_group(split_ranks=[list(ranks) for ranks in sets], timeout=_timeout)
    else:
        own = next((list(ranks) for ranks in sets if global_rank in ranks), None)
        # torch names such a group by the number that its ranks have made before. So a rank in no
        # set makes one for itself: otherwise it would wait for ever in the next one.
        alone = dist.new_group(
            own or [global_rank], timeout=_timeout, use_local_synchronization=True
        )
        made = alone if own else None
    if made is not None:
        _groups.append(made)
    return made


def saving_group() -> ProcessGroup:
    """All ranks on the CPU, for saves in the background; made at the first call, collective."""

    def make() -> ProcessGroup:
        _groups.append(dist.new_group(backend="gloo", timeout=_timeout))
        return _groups[-1]

    return kept("saves", make)


def message_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """The device on which tensors have to lie to be sent or received over a group.

    In a collective gloo copies a GPU's tensors to the host and back; for a point-to-point message
    it would hand the GPU's address to a socket. So the caller copies messages to this device, which
    waits for the GPU: for tests of several ranks on one GPU. Read in torch 2.13, not run on CUDA.
    """
    over_gloo = device.type == "cuda" and group._get_backend(device).name() == "gloo"
    return torch.device("cpu") if over_gloo else device


def gather_from_all_ranks(mine: Tensor) -> Tensor:
    """Every rank's vector, [n] -> [world size, n] in rank order; collective.

    Without a process group: [1, n].
    """
    if not dist.is_initialized():
        return mine[None]
    return all_gather(mine, None).view(-1, len(mine))
