"""The one collective of a few numbers that the executor and the callbacks share."""

from __future__ import annotations

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
