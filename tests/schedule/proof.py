"""Proves a schedule complete and free of deadlock, under conditions stricter than any backend's.

A send ends only when its receive is posted (rendezvous), and on every rank each process group is
one first-in-first-out queue, in which a transfer waits for all earlier ones. There is one process
group for each :class:`~lightning_wlb.schedule.actions.Channel`: one for forward and one for
backward messages, and with virtual stages one each for those that close the ring from the last rank
to the first and back. (On a shared process group the ring would stand still as soon as every rank
has a send at the head of its queue.) A schedule that passes runs on gloo and on NCCL, whatever
either buffers.

:func:`check_replicas` proves the same of several pipelines at once whose ranks meet in the actions
of shared micro-batches (DP-Merge): such an action begins when every replica that shares it has
come to it, because its attention is computed together.

Cost: ranks times actions at worst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, get_args

from lightning_wlb.schedule.actions import (
    BACKWARD,
    FORWARD,
    Action,
    Kind,
    channel_of,
    source_of,
    target_of,
)
from tests.schedule.rendezvous import Post, Stuck, Thread, Wait, run_to_the_end
from tests.schedule.support import format_program


def check_schedule(
    programs: Sequence[Sequence[Action]], micro_batches: int, virtual_stages: int = 1
) -> None:
    """:func:`check_replicas` of a single pipeline, with one program for each of its ranks."""
    check_replicas([programs], [micro_batches], virtual_stages)


def check_replicas(
    programs: Sequence[Sequence[Sequence[Action]]],
    micro_batches: Sequence[int],
    virtual_stages: int = 1,
    shared: Callable[[int, Action], Hashable] | None = None,
) -> None:
    """Prove that the programs of several replicas are complete and that they cannot deadlock.

    Args:
        programs: for each replica one program per pipeline rank.
        micro_batches: of each replica, how many pass through its pipeline.
        virtual_stages: V, how many stages each rank owns; rank r of P owns r, r + P, r + 2P, ...
        shared: the actions that replicas run together, see
            :func:`~tests.schedule.support.meetings_of`.

    Raises:
        ValueError: naming the missing, doubled or misplaced action, or every rank's first action
            that can never run and the message that it waits for; ranks are numbered replica by
            replica.
    """
    threads: list[Thread] = []
    run_together: dict[tuple[int, Hashable], Action] = {}
    for replica, of_replica in enumerate(programs):
        ranks = len(of_replica)
        stages = ranks * virtual_stages
        first = len(threads)
        chain = range(first, first + ranks)
        for rank, program in enumerate(of_replica):
            own_stages = range(rank, stages, ranks)
            _check_complete(first + rank, program, own_stages, stages, micro_batches[replica])
            own: list[Post | Wait] = []
            for action in program:
                own += messages_of(True, action, chain, stages)
                name = None if shared is None else shared(replica, action)
                if name is not None:
                    run_together[first + rank, name] = action
                    own.append(Wait(name))
                own += messages_of(False, action, chain, stages)
            threads.append(Thread(first + rank, own))
    counts = Counter(name for _, name in run_together)
    stuck = run_to_the_end([_joining(thread, counts) for thread in threads])
    if stuck:
        said = "; ".join(_said(each, run_together) for each in stuck)
        raise ValueError(f"the schedule deadlocks: {said}")


def _joining(thread: Thread, counts: Mapping[Hashable, int]) -> Thread:
    """A thread that posts its part of what is run together, when it is known by how many."""
    steps: list[Post | Wait] = []
    for step in thread.steps:
        if isinstance(step, Wait) and step.name in counts:
            steps.append(Post(step.name, step.name, counts[step.name]))
        steps.append(step)
    return Thread(thread.rank, steps)


def _check_complete(
    rank: int, program: Sequence[Action], own_stages: range, stages: int, micro_batches: int
) -> None:
    wanted = {
        Action(stage, kind, number)
        for stage in own_stages
        for kind in get_args(Kind)
        for number in range(micro_batches)
    }
    seen: set[Action] = set()
    for action in program:
        if action not in wanted or action in seen:
            problem = "is listed twice" if action in seen else "does not belong there"
            raise ValueError(f"rank {rank}: action {action} {problem}.")
        if action.kind == BACKWARD and action._replace(kind=FORWARD) not in seen:
            raise ValueError(f"rank {rank}: {action} comes before its forward.")
        source = source_of(action, stages)
        if source in wanted and source not in seen:
            raise ValueError(f"rank {rank}: {action} comes before {source}, whose output it needs.")
        seen.add(action)
    if seen != wanted:
        raise ValueError(f"rank {rank}: {format_program(sorted(wanted - seen))} never run.")


class _Message(NamedTuple):
    """The message that ``action`` receives, in the pipeline that begins at rank ``first``."""

    first: int
    action: Action
    sender: int


def messages_of(
    receives: bool, action: Action, chain: Sequence[int], stages: int
) -> list[Post | Wait]:
    """What a rank does before an action, if it ``receives``, or after it.

    Args:
        receives: the message that the action needs; else the one that needs it is sent to.
        action: of one of the ranks.
        chain: number of the rank at each place of the pipeline.
        stages: of the pipeline.
    """
    ranks = len(chain)
    other = source_of(action, stages) if receives else target_of(action, stages)
    if other is None or (other.stage - action.stage) % ranks == 0:
        return []
    receiver, sender = (action, other) if receives else (other, action)
    name = _Message(chain[0], receiver, chain[sender.stage % ranks])
    post = Post(channel_of(receiver, ranks), name, 2)
    return [post, Wait(name)] if receives else [post]


def _said(stuck: Stuck, meetings: Mapping[tuple[int, Hashable], Action]) -> str:
    """What a rank waits for, in words."""
    name = stuck.waits and stuck.waits.name
    if name is None:
        return f"a send of rank {stuck.rank} has no receive"
    if isinstance(name, _Message):
        return (
            f"rank {stuck.rank} waits for the message that {name.action} needs from rank"
            f" {name.sender}"
        )
    action = meetings[stuck.rank, name]
    return f"rank {stuck.rank} waits for the other replicas that run {action} with it"
