"""PackFlow: the one order of a pipeline's actions, for whole pieces and for slices (SlimPack §4.2).

Forwards run in the order of the plan. Backwards run first in, first out between pieces, and first
in, last out between the slices of a piece, because a slice's keys and values receive gradients from
every later slice. So a backward may need several forwards that have not run, and under plain 1F1B
the pipeline would stand still while they run. PackFlow plans the warm-up instead. Let n_j be the
number of forwards that must have run on the last stage before backward j. A stage that alternates
one forward and one backward gains one forward per backward. So n_j is raised, from the last to the
first, to at least n_{j+1} - 1, which spreads the forwards that a late chain needs over the
backwards before it. (The forward that SlimPack's Figure 9 injects is the case of one missing
forward.) Stage p of P runs min(M, n_j + P - 1 - p) forwards before backward j.

Well-known schedules are special cases:

* n_j = j + 1, which holds where pieces are whole, is **1F1B** (PipeDream-flush, Megatron-LM): at
  most P - p micro-batches are open on stage p, and with equal ones of forward time f and backward
  time b a step takes (P - 1 + M)·(f + b);
* with V virtual stages per rank it is **interleaved 1F1B** (Megatron-LM). A micro-batch goes
  through the ring of ranks V times, and micro-batches do so in rounds (:func:`rounds_of`). n_j then
  counts the stage passes of a rank. Every rank alternates from its first backward on, after a
  warm-up long enough for the most demanding backward, with 2·(P - 1 - p) more passes on rank p.
  With equal micro-batches and f, b the times of *one stage* a step takes
  (V·max(M, P) + min(M, P) - 1)·(f + b): from M = P on that is 1F1B with its bubble divided by V.
  The price is V times the messages and more open activations: at most
  2·(P - 1 - p) + (V - 1)·R + 1 stage passes per rank, with R the largest round (1F1B: V·(P - p)).

Up to max(n_j - j) + P - 1 - p micro-batches are open on stage p, so a chain as long as the step
opens all of them. The cost is linear in the number of actions. The tests prove, over
all ranks, that no order deadlocks (``tests/schedule/proof.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action


def packflow(
    rank: int, ranks: int, backward: Sequence[int], needs: Sequence[int], virtual_stages: int = 1
) -> list[Action]:
    """The program of one rank.

    Args:
        rank: 0-based pipeline rank.
        ranks: P, at least 1.
        backward: the micro-batches' places in forward order, in the order of their backwards.
        needs: for each backward, in the same order, how many forwards must have run on the last
            stage before it. It may be less than for an earlier backward.
        virtual_stages: V, at least 1; rank r of P owns stages r, r + P, r + 2P, ...
    """
    count = len(backward)
    assert sorted(backward) == list(range(count)), "each micro-batch runs backward once"
    pairs = zip(backward, needs, strict=True)
    assert all(place < need <= count for place, need in pairs), "a backward needs its own forward"
    stages = range(rank, rank + virtual_stages * ranks, ranks)
    rounds = rounds_of(count, ranks)
    forwards = [
        Action(stage, FORWARD, index) for round_ in rounds for stage in stages for index in round_
    ]
    # For each micro-batch, this rank's passes up to its forward on the rank's last stage.
    passes = {
        action.micro_batch: at + 1
        for at, action in enumerate(forwards)
        if action.stage == stages[-1]
    }
    backwards: list[Action] = []
    needed: list[int] = []
    for round_ in rounds:
        for stage in reversed(stages):
            backwards += [Action(stage, BACKWARD, backward[index]) for index in round_]
            needed += [passes[needs[index] - 1] for index in round_]
    if virtual_stages == 1:
        planned, extra = planned_warm_up(needed), ranks - 1 - rank
    else:
        # If a rank stopped alternating, the others could not finish their round.
        first = max((need - place for place, need in enumerate(needed)), default=0)
        planned, extra = list(range(first, first + len(needed))), 2 * (ranks - 1 - rank)
    program: list[Action] = []
    done = 0
    for action, need in zip(backwards, planned, strict=True):
        program += forwards[done : need + extra]
        done = max(done, min(len(forwards), need + extra))
        program.append(action)
    return program + forwards[done:]


def rounds_of(micro_batches: int, ranks: int) -> list[range]:
    """The rounds in which M micro-batches go through P ranks: consecutive, larger ones first.

    Sizes differ by at most one, and none is below P unless M is. Megatron-LM's rounds have P
    micro-batches each, so M must be a multiple of P: with a short last round, rank 0 would need its
    backwards before earlier ones can have run, and ranks may wait for each other (P = 8, M = 9).
    Here any M works, and for multiples of P the order is Megatron's.
    """
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def planned_warm_up(needs: Sequence[int]) -> list[int]:
    """How many forwards run before each backward, so that at most one runs between two backwards.

    These are the smallest numbers that are at least ``needs`` (as in :func:`packflow`), never fall,
    and rise by at most one from one backward to the next.
    """
    result = list(accumulate(needs, max))
    for index in range(len(result) - 2, -1, -1):
        result[index] = max(result[index], result[index + 1] - 1)
    return result


def backward_order(replica: ReplicaPlan) -> tuple[list[int], list[int]]:
    """The arguments ``backward`` and ``needs`` of :func:`packflow` for a replica's plan.

    Without cut pieces they are 0, 1, ... and 1, 2, ...
    """
    return [*replica.backward], [replica.needs[place] for place in replica.backward]


def backward_orders(replicas: Sequence[ReplicaPlan]) -> list[tuple[list[int], list[int]]]:
    """:func:`backward_order` of every replica of a step, aligned so that no replicas deadlock.

    Replicas that share micro-batches (DP-Merge) meet in their forwards and backwards. A replica
    whose own slices need a longer warm-up would run its second shared forward before its first
    shared backward, while another replica runs them in the reverse order. So each shared backward
    gets the largest number of forwards that any of its replicas plans before it. Shared
    micro-batches come first on all their replicas (:mod:`~lightning_wlb.planning.dp_merge`), so all
    replicas then meet in one order. That holds only for one stage per rank.
    """
    orders = [backward_order(replica) for replica in replicas]
    planned = [planned_warm_up(needs) for _, needs in orders]
    aligned = []
    for replica, order, own in zip(replicas, orders, planned, strict=True):
        needs = [
            min(max(planned[other][place] for other in sharers), len(replica.forward))
            for place, sharers in enumerate(replica.sharers[at] for at in replica.backward)
            if len(sharers) > 1
        ]
        # A replica that shares nothing keeps its needs, from which virtual stages plan otherwise.
        aligned.append((order[0], needs + own[len(needs) :]) if needs else order)
    return aligned
