"""Actions: what a pipeline rank does, as data that prints, parses and validates.

An action is written ``2F0``: stage 2 runs the forward of micro-batch 0; ``2B0`` its backward. A
*program* is the list of actions of one rank, a *schedule* the programs of all ranks of one
pipeline. Sends and receives are not written down: every forward but the first stage's begins
with a receive from the stage before and every forward but the last stage's ends with a send to
the stage after; backward the other way round.

:func:`check_schedule` proves a schedule free of deadlock under conditions stricter than any
backend's: a send ends only when its receive is posted (rendezvous), and every rank has one
first-in-first-out queue for forward messages and one for backward messages, in which a transfer
waits for all earlier ones. A schedule that passes runs on gloo and on NCCL, whatever either
buffers. Cost: linear in the number of actions.
"""

from __future__ import annotations

import re
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


def check_schedule(programs: Sequence[Sequence[Action]], micro_batches: int) -> None:
    """Prove that every rank's program is complete and that together they cannot deadlock.

    Args:
        programs: one program per pipeline rank; rank r owns stage r.
        micro_batches: how many micro-batches pass through the pipeline.

    Raises:
        ValueError: naming the missing or doubled action, or every rank's first action that can
            never run and the message that it waits for.
    """
    for rank, program in enumerate(programs):
        _check_complete(rank, program, micro_batches)
    stages = len(programs)
    compute: list[list[_Operation]] = [_operations(program, stages) for program in programs]
    _run_to_the_end(compute)


def _check_complete(rank: int, program: Sequence[Action], micro_batches: int) -> None:
    wanted = {Action(rank, kind, m) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)}
    seen: set[Action] = set()
    for action in program:
        if action not in wanted or action in seen:
            problem = "is listed twice" if action in seen else "does not belong there"
            raise ValueError(f"rank {rank}: action {action} {problem}.")
        if action.kind == BACKWARD and action._replace(kind=FORWARD) not in seen:
            raise ValueError(f"rank {rank}: {action} comes before its forward.")
        seen.add(action)
    if seen != wanted:
        raise ValueError(f"rank {rank}: {format_program(sorted(wanted - seen))} never run.")


class _Operation(NamedTuple):
    """A transfer or a computation of one rank, in program order."""

    action: Action
    what: Literal["receive", "run", "send"]
    peer: int


def _operations(program: Sequence[Action], stages: int) -> list[_Operation]:
    operations = []
    for action in program:
        source, target = action.stage - 1, action.stage + 1
        if action.kind == BACKWARD:
            source, target = target, source
        if 0 <= source < stages:
            operations.append(_Operation(action, "receive", source))
        operations.append(_Operation(action, "run", action.stage))
        if 0 <= target < stages:
            operations.append(_Operation(action, "send", target))
    return operations


def _run_to_the_end(programs: list[list[_Operation]]) -> None:
    """Advance every rank as far as it goes; raise if all stand still before the end.

    A send is posted without waiting; a receive is posted and waited for. Posted transfers of one
    direction leave a rank's queue in order, each when it is at the head on both sides.
    """
    at = [0] * len(programs)
    queues: list[dict[str, list[_Operation]]] = [{"F": [], "B": []} for _ in programs]
    waiting: list[_Operation | None] = [None] * len(programs)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while waiting[rank] is None and at[rank] < len(program):
                operation = program[at[rank]]
                at[rank] += 1
                progress = True
                if operation.what != "run":
                    queues[rank][operation.action.kind].append(operation)
                if operation.what == "receive":
                    waiting[rank] = operation
        for rank, queue in enumerate(queues):
            for kind in ("F", "B"):
                while queue[kind] and queue[kind][0].what == "send":
                    send = queue[kind][0]
                    peer = queues[send.peer][kind]
                    if not (
                        peer
                        and peer[0].what == "receive"
                        and peer[0].peer == rank
                        and peer[0].action.micro_batch == send.action.micro_batch
                    ):
                        break
                    if waiting[send.peer] == peer[0]:
                        waiting[send.peer] = None
                    queue[kind].pop(0)
                    peer.pop(0)
                    progress = True
    stuck = [
        f"rank {rank} waits for the message that {operation.action} needs from rank"
        f" {operation.peer}"
        for rank, operation in enumerate(waiting)
        if operation is not None
    ]
    if stuck or any(queue[kind] for queue in queues for kind in ("F", "B")):
        raise ValueError("the schedule deadlocks: " + ("; ".join(stuck) or "a send has no receive"))
