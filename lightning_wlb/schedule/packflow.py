"""PackFlow: the one order of a pipeline's actions, for whole pieces and for slices (SlimPack §4.2).

Forwards run in the order of the plan. Backwards run first in, first out between pieces and first
in, last out between the slices of a piece, whose keys and values receive gradients from every
later slice; so backward j may need more forwards than j + 1, and a plain 1F1B would stand still
while they arrive. The warm-up is planned instead: let n_j be the forwards that backward j needs on
the last stage. A stage that alternates one forward and one backward gains one forward per
backward, so n_j is raised, from right to left, to at least n_{j+1} - 1, and the forwards missing
for a late chain are spread over the backwards before it. (The forward that SlimPack's Figure 9
injects is the case in which one is missing.) Stage p of P runs min(M, n_j + P - 1 - p) forwards
before backward j.

The schedules of the field are cases of it:

* n_j = j + 1, as where pieces are whole, is **1F1B** (PipeDream-flush, Megatron-LM): at most P - p
  micro-batches are open on stage p, and with equal ones of forward time f and backward time b a
  step takes (P - 1 + M)·(f + b);
* n_j = M is **GPipe** (Huang et al., 2019): every forward, then every backward. As long as 1F1B,
  with all M open at once;
* with V virtual stages per rank it is **interleaved 1F1B** (Megatron-LM). Rank p of P owns the
  stages p, p + P, p + 2P, ...; a micro-batch goes round the ring of ranks V times, and forwards and
  backwards are taken in groups (:func:`groups_of`) that run stage by stage. n_i then counts the
  stage passes of a rank; every rank alternates from its first backward on, after a warm-up long
  enough for the most demanding backward, and rank p runs 2·(P - 1 - p) passes more ahead. With
  equal micro-batches and f, b the times of *one stage* a step takes (V·max(M, P) + min(M, P) -
  1)·(f + b); from M = P on that is 1F1B with its bubble divided by V. The price: V times the
  messages, and more open activations, at most 2·(P - 1 - p) + (V - 1)·G + 1 stage passes per rank,
  G the size of the largest group, where 1F1B holds V·(P - p).

It does not prove itself free of deadlock: :func:`~lightning_wlb.schedule.proof.check_schedule`
does, over all ranks. Linear in the number of actions. Open micro-batches per stage: up to
max(n_j - j) + P - 1 - p, so a chain as long as the step opens all of it, as GPipe does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action


def packflow(
    rank: int,
    ranks: int,
    backward: Sequence[int],
    needs: Sequence[int],
    virtual_stages: int = 1,
) -> list[Action]:
    """The program of one rank; stage numbers count over all ranks.

    Args:
        rank: 0-based pipeline rank.
        ranks: P, at least 1.
        backward: the micro-batches, by their place in forward order, in the order in which their
            backwards run.
        needs: for each backward, in the same order, how many forwards must have run on the last
            stage before it. What an earlier backward needs, a later one needs not repeat.
        virtual_stages: V, at least 1; rank r of P owns stages r, r + P, r + 2P, ...

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
    stages = range(rank, rank + virtual_stages * ranks, ranks)
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
    if virtual_stages > 1:
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


def groups_of(micro_batches: int, ranks: int) -> list[range]:
    """The groups in which M micro-batches go round P ranks: consecutive, larger ones first.

    Sizes differ by at most one, and none is below P where M is not. Megatron-LM's groups have P
    micro-batches each, so M must divide by P: a short last group is needed back at rank 0 before
    the backwards ahead of it can have run, and the ranks may wait for each other (P = 8, M = 9).
    Here any M works; where M divides by P the order is Megatron's.
    """
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


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
