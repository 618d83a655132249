"""The process groups over which a model's forward communicates, as one of its arguments.

Whoever runs a step passes them on; no module keeps one. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one rank; None in place of a group of one rank.

    Args:
        context: ranks that share the rows of a micro-batch.
        tensor: ranks that share every parameter.
        merged: number of data-parallel replicas that share a micro-batch (DP-Merge) -> the ranks
            of all of these replicas that share its rows.
    """

    context: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    merged: Mapping[int, ProcessGroup] = field(default_factory=dict)

    def of_rows(self, replicas: int) -> ProcessGroup | None:
        """The ranks that share the rows of a micro-batch that ``replicas`` replicas share."""
        return self.context if replicas == 1 else self.merged[replicas]


NO_GROUPS = ProcessGroups()
"""The process groups of a rank that shares neither rows nor parameters with another."""


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in a group; 1 if None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """Index of this rank within a group; 0 if None."""
    return 0 if group is None else dist.get_rank(group)
