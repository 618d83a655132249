"""PackFlow: 1F1B for plans whose pieces are sliced over micro-batches (SlimPack §4.2).

Forwards run in the order of the plan. Backwards run first in, first out between pieces and first
in, last out between the slices of a piece, whose keys and values receive gradients from every
later slice; so backward j may need more forwards than j + 1, and a plain 1F1B would stand still
while they arrive. The warm-up is planned instead: let n_j be the forwards that backward j needs on
the last stage. A stage that alternates one forward and one backward gains one forward per
backward, so n_j is raised, from right to left, to at least n_{j+1} - 1, and the forwards missing
for a late chain are spread over the backwards before it. (The forward that SlimPack's Figure 9
injects is the case in which one is missing.) Stage p of P runs min(M, n_j + P - 1 - p) forwards
before backward j. Without slices n_j = j + 1 and the order is that of 1F1B.

With V stages per rank forwards and backwards are taken in groups that go round the ring of ranks
V times, as in interleaved 1F1B. Here n_i counts a rank's stage passes; every rank alternates from
its first backward on, after a warm-up long enough for the most demanding backward, and rank p runs
2·(P - 1 - p) passes more ahead. Without slices the order is that of interleaved 1F1B.

Neither proves itself free of deadlock: :func:`~lightning_wlb.schedule.actions.check_schedule`
does, over all ranks. Linear in the number of actions. Open micro-batches per stage: up to
max(n_j - j) + P - 1 - p, so a chain as long as the step opens all of it, as GPipe does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.schedule.interleaved import groups_of


def packflow(
    rank: int,
    ranks: int,
    backward: Sequence[int],
    needs: Sequence[int],
    stages_per_rank: int = 1,
) -> list[Action]:
    """The program of one rank; stage numbers count over all ranks.

    Args:
        rank: 0-based pipeline rank.
        ranks: P, at least 1.
        backward: the micro-batches, by their place in forward order, in the order in which their
            backwards run.
        needs: for each backward, in the same order, how many forwards must have run on the last
            stage before it. What an earlier backward needs, a later one needs not repeat.
        stages_per_rank: V, at least 1; rank r of P owns stages r, r + P, r + 2P, ...

    Raises:
        ValueError: if ``backward`` is no order of 0 ... M - 1, or a backward needs more forwards
            than there are or does not need its own.
    """
    count = len(backward)
    if sorted(backward) != list(range(count)) or len(needs) != count:
        raise ValueError(
            f"backward={list(backward)} with {len(needs)} needs: it must name each of the"
            f" {count} micro-batches once, and each needs a number of forwards."
        )
    for micro_batch, need in zip(backward, needs, strict=True):
        if not micro_batch < need <= count:
            raise ValueError(
                f"the backward of micro-batch {micro_batch} needs {need} forwards; it needs its"
                f" own, so at least {micro_batch + 1}, and there are {count}."
            )
    stages = range(rank, rank + stages_per_rank * ranks, ranks)
    groups = groups_of(count, ranks)
    forwards = [
        Action(stage, FORWARD, index) for group in groups for stage in stages for index in group
    ]
    last = {
        action.micro_batch: at + 1
        for at, action in enumerate(forwards)
        if action.stage == stages[-1]
    }
    backwards: list[Action] = []
    passes: list[int] = []
    for group in groups:
        for stage in reversed(stages):
            backwards += [Action(stage, BACKWARD, backward[index]) for index in group]
            passes += [last[needs[index] - 1] for index in group]
    ahead = ranks - 1 - rank
    planned = planned_warm_up(passes)
    if stages_per_rank > 1:
        ahead *= 2
        # A rank that stops alternating would keep the others from closing their round.
        first = max((need - place for place, need in enumerate(passes)), default=0)
        planned = list(range(first, first + len(passes)))
    program: list[Action] = []
    done = 0
    for action, need in zip(backwards, planned, strict=True):
        program += forwards[done : need + ahead]
        done = max(done, min(len(forwards), need + ahead))
        program.append(action)
    return program + forwards[done:]


def planned_warm_up(needs: Sequence[int]) -> list[int]:
    """Forwards to run before each backward so that none has to wait for more than one.

    Args:
        needs: forwards that each backward needs, in the order of the backwards.

    Returns:
        The smallest numbers that are at least those of ``needs``, never fall, and rise by at most
        one from one backward to the next.
    """
    result = list(accumulate(needs, max))
    for index in range(len(result) - 2, -1, -1):
        result[index] = max(result[index], result[index + 1] - 1)
    return result


def backward_order(replica: ReplicaPlan) -> tuple[list[int], list[int]]:
    """The order of backwards and what each needs.

    Returns:
        ``backward`` and ``needs`` of :func:`packflow`; for a plan without slices 0, 1, 2, ... and
        1, 2, 3, ...

    Raises:
        ValueError: if a backward micro-batch groups the slices otherwise than every forward one.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    last_of_piece: dict[tuple[int, int], int] = {}
    for index, group in enumerate(replica.forward):
        places.setdefault(tuple(sorted(group.slices)), []).append(index)
        for piece in replica.slices_of(group):
            last_of_piece[piece.document, piece.origin] = index
    backward: list[int] = []
    needs: list[int] = []
    for number, group in enumerate(replica.backward):
        same = places.get(tuple(sorted(group.slices)))
        if not same:
            raise ValueError(
                f"backward micro-batch {number} groups slices that no forward micro-batch groups"
                " so: the plan is asymmetric, and one schedule of whole micro-batches cannot run"
                " it."
            )
        backward.append(same.pop(0))
        last = (last_of_piece[piece.document, piece.origin] for piece in replica.slices_of(group))
        needs.append(max(last, default=backward[-1]) + 1)
    return backward, needs


def backward_orders(replicas: Sequence[ReplicaPlan]) -> list[tuple[list[int], list[int]]]:
    """:func:`backward_order` of every replica of a step, so that none waits for another for ever.

    Replicas that share micro-batches (DP-Merge) meet in their forwards and backwards. A replica
    whose own slices need a longer warm-up would come to its second shared forward before its
    first shared backward, another the other way round. So each shared backward needs the most
    forwards that any of its replicas plans before it. Shared micro-batches come first on all
    their replicas (:mod:`~lightning_wlb.planning.dp_merge`), so all then meet in one order, if each
    rank has one stage: the groups of interleaved 1F1B depend on the number of micro-batches.

    Raises:
        ValueError: as :func:`backward_order`.
    """
    orders = [backward_order(replica) for replica in replicas]
    planned = [planned_warm_up(needs) for _, needs in orders]
    aligned = []
    for replica, (backward, _), own in zip(replicas, orders, planned, strict=True):
        needs = [
            min(max(planned[other][place] for other in group.replicas), len(replica.forward))
            for place, group in enumerate(replica.backward)
            if len(group.replicas) > 1
        ]
        aligned.append((backward, needs + own[len(needs) :]))
    return aligned
