"""What actions leave for others to free: the part of memory that no forward opens for its backward.

* The backward of a later slice leaves gradients of an earlier micro-batch's keys, which that one's
  own backward takes (:mod:`~lightning_wlb.attention.kv_cache`). The first such backward makes
  them, for the whole micro-batch.
* A backward leaves the gradient that it sends to the stage before, until a message comes back that
  proves its arrival (:mod:`~lightning_wlb.schedule.receipts`). What a forward sends on is held
  until its backward anyway.

Cost: about 2 µs per action, and the square of the slices of a piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, Action, target_of
from lightning_wlb.schedule.packflow import backward_order
from lightning_wlb.schedule.receipts import receipts


def freed_bytes(
    programs: Sequence[Sequence[Action]],
    replica: ReplicaPlan,
    stages: int,
    key_gradients: Callable[[int, int], int],
    boundary: Callable[[int], int],
) -> Mapping[Action, int]:
    """What each action frees of what others left, less what it leaves; 0 where not named.

    Args:
        programs: of the replica's ranks.
        replica: as it is executed (``planning.units``).
        stages: of all ranks.
        key_gradients: of (stage, micro-batch), bytes of the gradients of its keys.
        boundary: of a micro-batch, bytes that a stage sends to its neighbour.
    """
    freed: defaultdict[Action, int] = defaultdict(int)
    order, _ = backward_order(replica)
    for micro_batch, reader in first_readers(replica).items():
        for stage in range(stages):
            size = key_gradients(stage, micro_batch)
            freed[Action(stage, BACKWARD, order[reader])] -= size
            freed[Action(stage, BACKWARD, micro_batch)] += size
    ranks = len(programs)
    by_rank = dict(enumerate(programs))
    for rank, program in enumerate(programs):
        for action in program:
            target = target_of(action, stages)
            if action.kind == BACKWARD and target is not None and target.stage % ranks != rank:
                freed[action] -= boundary(action.micro_batch)
        for receiver, sends in receipts(by_rank, rank, ranks, stages).items():
            freed[receiver] += sum(
                boundary(sent.micro_batch) for sent in sends if sent.kind == BACKWARD
            )
    return freed


def first_readers(replica: ReplicaPlan) -> dict[int, int]:
    """Of each forward micro-batch whose keys others read in backward, the first that does.

    Args:
        replica: as it is executed (``planning.units``).

    Returns:
        Places in ``forward``, and in ``backward``.
    """
    slices_of: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    place = {number: at for at, group in enumerate(replica.forward) for number in group.slices}
    for number, part in enumerate(replica.slices):
        slices_of[part.document, part.origin].append((part.start, number))
    readers: dict[int, int] = {}
    for at, group in enumerate(replica.backward):
        own = set(group.slices)
        for part in replica.slices_of(group):
            if part.context:
                for start, number in slices_of[part.document, part.origin]:
                    if start < part.start and number not in own:
                        readers.setdefault(place[number], at)
    return readers
