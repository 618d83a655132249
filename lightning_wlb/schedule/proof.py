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

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple, get_args

from lightning_wlb.schedule.actions import (
    BACKWARD,
    FORWARD,
    Action,
    Channel,
    Kind,
    channel_of,
    format_program,
    source_of,
    target_of,
)


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
            :func:`~lightning_wlb.schedule.programs.meetings_of`.

    Raises:
        ValueError: naming the missing, doubled or misplaced action, or every rank's first action
            that can never run and the message that it waits for; ranks are numbered replica by
            replica.
    """
    steps: list[list[_Step]] = []
    meetings: dict[Hashable, int] = {}
    for replica, of_replica in enumerate(programs):
        ranks = len(of_replica)
        stages = ranks * virtual_stages
        first = len(steps)
        for rank, program in enumerate(of_replica):
            own_stages = range(rank, stages, ranks)
            _check_complete(first + rank, program, own_stages, stages, micro_batches[replica])
            own: list[_Step] = []
            for action in program:
                own += _transfers("receive", action, first, ranks, stages)
                name = None if shared is None else shared(replica, action)
                if name is not None:
                    meetings[name] = meetings.get(name, 0) + 1
                    own.append(_Meeting(name, action))
                own += _transfers("send", action, first, ranks, stages)
            steps.append(own)
    _run_to_the_end(steps, meetings)


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


class _Transfer(NamedTuple):
    """One side of a message; ``action`` is the one that receives it."""

    what: Literal["receive", "send"]
    action: Action
    peer: int
    channel: Channel


class _Meeting(NamedTuple):
    """An action that several replicas run together, under a name that all of them know."""

    name: Hashable
    action: Action


_Step = _Transfer | _Meeting


def _transfers(
    what: Literal["receive", "send"], action: Action, first: int, ranks: int, stages: int
) -> list[_Transfer]:
    """What a rank posts before or after an action; ``first``: number of the replica's rank 0."""
    other = source_of(action, stages) if what == "receive" else target_of(action, stages)
    if other is None or (other.stage - action.stage) % ranks == 0:
        return []
    receiver = action if what == "receive" else other
    peer = first + other.stage % ranks
    return [_Transfer(what, receiver, peer, channel_of(receiver, ranks))]


def _run_to_the_end(programs: list[list[_Step]], meetings: dict[Hashable, int]) -> None:
    """Advance every rank as far as it goes; raise if all stand still before the end.

    A rank posts a send and goes on; it posts a receive and waits. Posted transfers of one channel
    leave a rank's queue in order, each when it is at the head on both sides. At a meeting a rank
    waits until all ranks that take part have come.
    """
    ranks = len(programs)
    at = [0] * ranks
    queues: list[dict[Channel, deque[_Transfer]]] = [{} for _ in range(ranks)]
    waiting: list[_Step | None] = [None] * ranks
    present: dict[Hashable, list[int]] = {}
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while waiting[rank] is None and at[rank] < len(program):
                step = program[at[rank]]
                at[rank] += 1
                progress = True
                if isinstance(step, _Meeting):
                    waiting[rank] = step
                    came = present.setdefault(step.name, [])
                    came.append(rank)
                    if len(came) == meetings[step.name]:
                        for other in came:
                            waiting[other] = None
                    continue
                queues[rank].setdefault(step.channel, deque()).append(step)
                if step.what == "receive":
                    waiting[rank] = step
        for rank in range(ranks):
            for channel, queue in queues[rank].items():
                while queue and queue[0].what == "send":
                    send = queue[0]
                    peer = queues[send.peer].get(channel)
                    if not peer or peer[0] != _Transfer("receive", send.action, rank, channel):
                        break
                    if waiting[send.peer] == peer[0]:
                        waiting[send.peer] = None
                    queue.popleft()
                    peer.popleft()
                    progress = True
    stuck = [
        f"rank {rank} waits for the message that {step.action} needs from rank {step.peer}"
        if isinstance(step, _Transfer)
        else f"rank {rank} waits for the other replicas that run {step.action} with it"
        for rank, step in enumerate(waiting)
        if step is not None
    ]
    if stuck or any(queue for channels in queues for queue in channels.values()):
        raise ValueError("the schedule deadlocks: " + ("; ".join(stuck) or "a send has no receive"))
