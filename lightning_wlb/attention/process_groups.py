"""The process groups that a model's forward communicates over, as one argument of it.

Whoever runs a step makes them and passes them on; no module keeps one. Nothing here communicates.
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
        merged: where data-parallel replicas share a micro-batch (DP-Merge), by their number: the
            ranks that share its rows, over all of these replicas.
    """

    context: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    merged: Mapping[int, ProcessGroup] = field(default_factory=dict)

    def of_rows(self, replicas: int) -> ProcessGroup | None:
        """The ranks that share the rows of a micro-batch of so many replicas."""
        return self.context if replicas == 1 else self.merged[replicas]


NO_GROUPS = ProcessGroups()
"""Of a rank that shares nothing."""


def group_size(group: ProcessGroup | None) -> int:
    """Ranks of a group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """Place of this rank in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)
