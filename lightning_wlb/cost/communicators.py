"""How many process groups a rank communicates over, and what each takes of its device.

Cost: O(1) for a mesh; for strategies O(pipelines).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, alike

COMMUNICATOR_BYTES = 24 * (2**22 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)
"""What a process group takes of a GPU under NCCL once it has reduced or gathered: a ring receives
into buffers of three protocols on each channel (defaults in src/init.cc of NCCL 2.30), of which
eight H100 have 24 (a log in NCCL's issue 1259). From the sources, not measured."""


def communicators(mesh: Mesh) -> int:
    """Process groups over which a rank communicates, with all that sharing of replicas may add."""
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


def communicators_elsewhere(strategies: Sequence[Sequence[Scheme]], per_node: int) -> int:
    """Process groups that steps on pipelines of their own add, on the rank that gets most.

    Of each strategy those of its pipelines, and what sharing of micro-batches may add; for all of
    them together those over which parameters travel.

    Args:
        strategies: that steps may take; none: no group.
        per_node: ranks of a node.
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
    return int(counts.max()) + (2 if 1 < per_node < len(counts) else 1)
