"""What torch.distributed lacks: one communicator of many, and a collective of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

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
