"""Which replica runs which micro-batch.

Micro-batches are formed over all replicas at once (N is a global number) and then dealt, so that
what enters a step does not depend on the mesh. A replica may get more micro-batches than another
and, where replicas outnumber micro-batches, none.

Both ways keep the packing's order within a replica. Empty micro-batches are left out before.

Cost: O(N·log N) for N micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from lightning_wlb.plan import Piece

Deal = Callable[[Sequence[int], int], list[list[int]]]


def round_robin(loads: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal micro-batches in their order, one to each replica in turn.

    Args:
        loads: work of each micro-batch.
        replicas: number of replicas.

    Returns:
        For each replica the indices of its micro-batches, ascending.
    """
    return [list(range(replica, len(loads), replicas)) for replica in range(replicas)]


def longest_first(loads: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal micro-batches by descending work, each to the replica with the least work so far.

    Equal micro-batches go by index, equal replicas by number. Arguments and result as for
    :func:`round_robin`.
    """
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    totals = [(0, replica) for replica in range(replicas)]
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        total, replica = totals[0]
        dealt[replica].append(index)
        heapq.heapreplace(totals, (total + loads[index], replica))
    return [sorted(indices) for indices in dealt]


def deal_groups(
    groups: Sequence[list[Piece]], replicas: int, work: Callable[[int], int], deal: Deal
) -> list[list[list[Piece]]]:
    """Deal the micro-batches that are not empty, as they are.

    Args:
        groups: pieces of each micro-batch.
        replicas: number of replicas.
        work: cost of a piece from its tokens.
        deal: :func:`round_robin` or :func:`longest_first`.

    Returns:
        For each replica its micro-batches, in the order of ``groups``.
    """
    filled = [group for group in groups if group]
    loads = [sum(work(piece.tokens) for piece in group) for group in filled]
    return [[filled[index] for index in indices] for indices in deal(loads, replicas)]
