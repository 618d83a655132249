"""Actions: what a pipeline rank does, as data that prints, parses and validates.

An action is written ``2F0``: stage 2 runs the forward of micro-batch 0; ``2B0`` its backward. A
*program* is the list of actions of one rank, a *schedule* the programs of all ranks of one
pipeline. Stages are numbered over the whole pipeline; stage s lives on rank s % ranks. Sends and
receives are not written down: every forward but the first stage's begins with a receive from the
stage before and every forward but the last stage's ends with a send to the stage after; backward
the other way round. Between two stages of one rank nothing is sent.

:func:`check_schedule` proves a schedule free of deadlock under conditions stricter than any
backend's: a send ends only when its receive is posted (rendezvous), and on every rank each
communicator is one first-in-first-out queue, in which a transfer waits for all earlier ones. The
communicators are :class:`Channel`: forward and backward messages have one each, and so have those
that close the ring from the last rank to the first and back, which exist only with several stages
per rank. (On a shared communicator the ring would stand still as soon as every rank has a send at
the head of its queue.) A schedule that passes runs on gloo and on NCCL, whatever either buffers.
Cost: ranks times actions at worst.

:func:`check_replicas` proves the same of several pipelines at once whose ranks meet in the actions
of shared micro-batches (DP-Merge): such an action goes on when every replica that shares it has
come to it, because its attention is computed together.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, cast, get_args

FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"

Kind = Literal["F", "B"]

_PATTERN = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One unit of work: a pass of one micro-batch through one stage."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read what ``str()`` wrote.

        Raises:
            ValueError: if the text is not an action.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action; write a stage, F or B, and a micro-batch: '2F0'."
            )
        stage, kind, micro_batch = match.groups()
        return Action(int(stage), cast(Kind, kind), int(micro_batch))


def format_program(program: Iterable[Action]) -> str:
    """A program in one line: ``0F0 0F1 0B0 0B1``."""
    return " ".join(str(action) for action in program)


def parse_program(text: str) -> list[Action]:
    """Read what :func:`format_program` wrote."""
    return [Action.parse(word) for word in text.split()]


class Channel(NamedTuple):
    """A communicator: which messages share a queue on each rank."""

    kind: Kind
    closes_ring: bool


def source_of(action: Action, stages: int) -> Action | None:
    """The action whose message ``action`` needs, None where it needs none.

    A forward needs that of the stage before, a backward that of the stage after; the last stage's
    backward needs only the forward on its own rank.

    Args:
        action: any action.
        stages: number of stages over all ranks.
    """
    stage = action.stage - 1 if action.kind == FORWARD else action.stage + 1
    return action._replace(stage=stage) if 0 <= stage < stages else None


def target_of(action: Action, stages: int) -> Action | None:
    """The action that needs the message of ``action``, None where nobody does.

    Args:
        action: any action.
        stages: number of stages over all ranks.
    """
    stage = action.stage + 1 if action.kind == FORWARD else action.stage - 1
    return action._replace(stage=stage) if 0 <= stage < stages else None


def channel_of(action: Action, ranks: int) -> Channel:
    """The communicator on which ``action`` receives its message.

    Args:
        action: one that receives a message from another rank.
        ranks: number of ranks of the pipeline.
    """
    if action.kind == FORWARD:
        return Channel(FORWARD, closes_ring=action.stage % ranks == 0)
    return Channel(BACKWARD, closes_ring=(action.stage + 1) % ranks == 0)


def check_schedule(
    programs: Sequence[Sequence[Action]], micro_batches: int, stages_per_rank: int = 1
) -> None:
    """Prove that every rank's program is complete and that together they cannot deadlock.

    Args:
        programs: one program per pipeline rank; rank r of P owns stages r, r + P, r + 2P, ...
        micro_batches: how many micro-batches pass through the pipeline.
        stages_per_rank: how many stages each rank owns.

    Raises:
        ValueError: naming the missing, doubled or misplaced action, or every rank's first action
            that can never run and the message that it waits for.
    """
    check_replicas([programs], [micro_batches], stages_per_rank)


def check_replicas(
    programs: Sequence[Sequence[Sequence[Action]]],
    micro_batches: Sequence[int],
    stages_per_rank: int = 1,
    shared: Callable[[int, Action], Hashable] | None = None,
) -> None:
    """Prove that the programs of several replicas are complete and that they cannot deadlock.

    Args:
        programs: for each replica one program per pipeline rank.
        micro_batches: of each replica, how many pass through its pipeline.
        stages_per_rank: how many stages each rank owns.
        shared: of (replica, action), what the action is called on all replicas that run it
            together; None for an action of one replica.

    Raises:
        ValueError: as :func:`check_schedule`; ranks are numbered replica by replica.
    """
    steps: list[list[_Step]] = []
    meetings: dict[Hashable, int] = {}
    for replica, of_replica in enumerate(programs):
        ranks = len(of_replica)
        stages = ranks * stages_per_rank
        first = len(steps)
        for rank, program in enumerate(of_replica):
            own_stages = range(rank, stages, ranks)
            _check_complete(first + rank, program, own_stages, stages, micro_batches[replica])
            own: list[_Step] = []
            for action in program:
                receive, send = _transfers(action, first, ranks, stages)
                name = None if shared is None else shared(replica, action)
                own += receive
                if name is not None:
                    meetings[name] = meetings.get(name, 0) + 1
                    own.append(_Meeting(name, action))
                own += send
            steps.append(own)
    _run_to_the_end(steps, meetings)


def _check_complete(
    rank: int,
    program: Sequence[Action],
    own_stages: range,
    stages: int,
    micro_batches: int,
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
    """One side of a message: ``action`` is the one that receives it, on whichever rank."""

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
    action: Action, first: int, ranks: int, stages: int
) -> tuple[list[_Transfer], list[_Transfer]]:
    """What a rank posts before and after an action; ``first`` is the number of its rank 0."""
    rank = action.stage % ranks
    source, target = source_of(action, stages), target_of(action, stages)
    receive, send = [], []
    if source is not None and source.stage % ranks != rank:
        peer = first + source.stage % ranks
        receive.append(_Transfer("receive", action, peer, channel_of(action, ranks)))
    if target is not None and target.stage % ranks != rank:
        peer = first + target.stage % ranks
        send.append(_Transfer("send", target, peer, channel_of(target, ranks)))
    return receive, send


def _run_to_the_end(programs: list[list[_Step]], meetings: dict[Hashable, int]) -> None:
    """Advance every rank as far as it goes; raise if all stand still before the end.

    A send is posted without waiting; a receive is posted and waited for. Posted transfers of one
    channel leave a rank's queue in order, each when it is at the head on both sides. A meeting is
    waited for until as many ranks have come as it takes.
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
