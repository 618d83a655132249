"""Interleaved 1F1B: several stages per rank, so that the pipeline fills sooner (Megatron-LM).

Rank p of P owns the V stages p, p + P, p + 2P, ...; a micro-batch goes round the ring of ranks V
times. Micro-batches are taken in groups: a group's forwards run stage by stage, its backwards
likewise, last stage first. Every rank runs forwards in the same order, and backwards too. Rank p
runs W = 2·(P - 1 - p) + (V - 1)·G forwards, G the size of the largest group, and then a forward
and a backward in turn.

Megatron-LM's groups have P micro-batches each, so M must divide by P: a short last group is needed
back at rank 0 before the backwards ahead of it can have run, and the ranks may wait for each other
(P = 8, M = 9). Here M is dealt into max(1, M // P) groups as equal as possible. Each has at least P
micro-batches (or all of them, if M < P), so any M works; where M divides by P the order is
Megatron's.

With equal micro-batches and f, b the times of *one stage* a step takes
(V·max(M, P) + min(M, P) - 1)·(f + b); from M = P on that is 1F1B with its bubble divided by V.
The price: V times the messages, and more open activations, at most W + 1 stage passes per rank
where 1F1B holds V·(P - p).
"""

from __future__ import annotations

from itertools import pairwise

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action


def interleaved(
    rank: int, ranks: int, micro_batches: int, stages_per_rank: int = 2
) -> list[Action]:
    """The program of one rank; stage numbers count over all ranks.

    Args:
        rank: 0-based pipeline rank.
        ranks: P, at least 1.
        micro_batches: M, at least 0.
        stages_per_rank: V, at least 1. With 1 the order is valid, but 1F1B opens less.
    """
    groups = groups_of(micro_batches, ranks)
    rounds = range(stages_per_rank)
    forward = [
        Action(round_ * ranks + rank, FORWARD, micro_batch)
        for group in groups
        for round_ in rounds
        for micro_batch in group
    ]
    backward = [
        Action(round_ * ranks + rank, BACKWARD, micro_batch)
        for group in groups
        for round_ in reversed(rounds)
        for micro_batch in group
    ]
    largest = max(len(group) for group in groups)
    warm_up = min(len(forward), 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * largest)
    program = forward[:warm_up]
    for action, partner in zip(forward[warm_up:], backward, strict=False):
        program += (action, partner)
    return program + backward[len(forward) - warm_up :]


def groups_of(micro_batches: int, ranks: int) -> list[range]:
    """The groups in which M micro-batches go round P ranks: consecutive, larger ones first.

    Sizes differ by at most one, and none is below P where M is not.
    """
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
