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
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"

_PATTERN = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One unit of work: a pass of one micro-batch through one stage."""

    stage: int
    kind: Literal["F", "B"]
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
        return Action(int(stage), FORWARD if kind == "F" else BACKWARD, int(micro_batch))


def format_program(program: Iterable[Action]) -> str:
    """A program in one line: ``0F0 0F1 0B0 0B1``."""
    return " ".join(str(action) for action in program)


def parse_program(text: str) -> list[Action]:
    """Read what :func:`format_program` wrote."""
    return [Action.parse(word) for word in text.split()]


class Channel(NamedTuple):
    """A communicator: which messages share a queue on each rank."""

    kind: Literal["F", "B"]
    closes_ring: bool


def source_of(action: Action, stages: int) -> Action | None:
    """The action whose message ``action`` needs, None where it needs none.

    A forward needs that of the stage before, a backward that of the stage after; the last stage's
    backward needs only its own forward.

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
    later = action.stage if action.kind == FORWARD else action.stage + 1
    return Channel(action.kind, closes_ring=later % ranks == 0)


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
    ranks = len(programs)
    stages = ranks * stages_per_rank
    for rank, program in enumerate(programs):
        _check_complete(rank, program, ranks, stages, micro_batches)
    _run_to_the_end([_transfers(program, ranks, stages) for program in programs])


def _check_complete(
    rank: int, program: Sequence[Action], ranks: int, stages: int, micro_batches: int
) -> None:
    wanted = {
        Action(stage, kind, micro_batch)
        for stage in range(rank, stages, ranks)
        for kind in (FORWARD, BACKWARD)
        for micro_batch in range(micro_batches)
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


def _transfers(program: Sequence[Action], ranks: int, stages: int) -> list[_Transfer]:
    """What a rank posts, in order; it waits for each receive before it goes on."""
    transfers = []
    for action in program:
        rank = action.stage % ranks
        source, target = source_of(action, stages), target_of(action, stages)
        if source is not None and source.stage % ranks != rank:
            transfers.append(_Transfer("receive", action, source.stage % ranks))
        if target is not None and target.stage % ranks != rank:
            transfers.append(_Transfer("send", target, target.stage % ranks))
    return transfers


def _run_to_the_end(programs: list[list[_Transfer]]) -> None:
    """Advance every rank as far as it goes; raise if all stand still before the end.

    A send is posted without waiting; a receive is posted and waited for. Posted transfers of one
    channel leave a rank's queue in order, each when it is at the head on both sides.
    """
    ranks = len(programs)
    at = [0] * ranks
    queues: list[dict[Channel, deque[_Transfer]]] = [{} for _ in range(ranks)]
    waiting: list[_Transfer | None] = [None] * ranks
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while waiting[rank] is None and at[rank] < len(program):
                transfer = program[at[rank]]
                at[rank] += 1
                progress = True
                queues[rank].setdefault(channel_of(transfer.action, ranks), deque()).append(
                    transfer
                )
                if transfer.what == "receive":
                    waiting[rank] = transfer
        for rank in range(ranks):
            for channel, queue in queues[rank].items():
                while queue and queue[0].what == "send":
                    send = queue[0]
                    peer = queues[send.peer].get(channel)
                    if not peer or peer[0] != _Transfer("receive", send.action, rank):
                        break
                    if waiting[send.peer] == peer[0]:
                        waiting[send.peer] = None
                    queue.popleft()
                    peer.popleft()
                    progress = True
    stuck = [
        f"rank {rank} waits for the message that {transfer.action} needs from rank {transfer.peer}"
        for rank, transfer in enumerate(waiting)
        if transfer is not None
    ]
    if stuck or any(queue for channels in queues for queue in channels.values()):
        raise ValueError("the schedule deadlocks: " + ("; ".join(stuck) or "a send has no receive"))
