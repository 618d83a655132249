"""Actions of pipeline ranks, the messages that follow from them, and the times at which they ran.

An action is written ``2F0``: stage 2 runs the forward of micro-batch 0; ``2B0`` is its backward. A
*program* is the list of actions of one rank, a *schedule* the programs of all ranks of one
pipeline. Stages are numbered over the whole pipeline; stage s is on rank s % ranks.

Sends and receives are not written down, because they follow from the actions: a forward begins with
a receive from the stage before, if there is one, and ends with a send to the stage after, if there
is one; for a backward it is the reverse. Between two stages of one rank nothing is sent.
:func:`receipts` says when a rank knows, without asking, that a message it sent has arrived.

:class:`Timing` is an action as it was measured, :class:`Span` an action on a time axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One unit of work: a pass of one micro-batch through one stage."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Channel(NamedTuple):
    """Messages that share a process group, and so a queue on each rank."""

    kind: Kind
    closes_ring: bool


def source_of(action: Action, stages: int) -> Action | None:
    """The action whose message ``action`` needs among ``stages`` stages of all ranks, or None.

    A forward needs the message of the stage before, a backward that of the stage after; the last
    stage's backward needs only the forward on its own rank.
    """
    stage = action.stage - 1 if action.kind == FORWARD else action.stage + 1
    return action._replace(stage=stage) if 0 <= stage < stages else None


def target_of(action: Action, stages: int) -> Action | None:
    """The action that needs the message of ``action``, or None: :func:`source_of` turned round."""
    stage = action.stage + 1 if action.kind == FORWARD else action.stage - 1
    return action._replace(stage=stage) if 0 <= stage < stages else None


def channel_of(action: Action, ranks: int) -> Channel:
    """The channel on which ``action`` receives its message, in a pipeline of ``ranks`` ranks."""
    sender_side = action.stage if action.kind == FORWARD else action.stage + 1
    return Channel(action.kind, closes_ring=sender_side % ranks == 0)


def receipts(
    programs: Mapping[int, Sequence[Action]], rank: int, ranks: int, stages: int
) -> dict[Action, list[Action]]:
    """The messages that a rank sent and that are proven received once an action's input arrives.

    A neighbour sends the message of an action after it has received what that action needed. So
    when that message arrives, the rank can free the buffers of everything that it sent for that
    action; otherwise it would hold every message until the end of the step. Messages without an
    answer (of the pipeline's last backwards, one for each forward of the warm-up) are held until
    then. The cost is linear in the actions of two neighbours.

    Args:
        programs: programs by rank, of at least the neighbours of ``rank`` in the ring of ranks.
        rank: the rank that sent the messages.
        ranks: number of ranks of the pipeline.
        stages: number of stages over all ranks.

    Returns:
        For each action of the rank that receives a message from another rank: the rank's actions
        whose messages the sender had received before it sent this one. Each is listed once, in
        the order in which their messages were received.
    """
    proven: dict[Action, list[Action]] = {}
    for peer in sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank}):
        received: list[Action] = []
        for action in programs[peer]:
            source, target = source_of(action, stages), target_of(action, stages)
            if source is not None and source.stage % ranks == rank:
                received.append(source)
            if target is not None and target.stage % ranks == rank:
                proven[target] = received
                received = []
    return proven


@dataclass(frozen=True, slots=True)
class Timing:
    """One action as it ran on one rank; all times in seconds."""

    action: Action
    begin: float  #: when it began, from the start of the rank's step (receives included before it)
    #: elapsed time of the computation, without waits for the neighbouring stages, but with waits in
    #: collectives of context and tensor parallelism
    wall: float
    compute: float  #: time the rank itself worked: its own CPU time on CPU, ``wall`` on a GPU
    attention: float  #: the part of ``compute`` spent in attention kernels, collectives excluded


class Span(NamedTuple):
    """One action on a rank's time axis; integer nanoseconds from the start of the step."""

    action: Action
    begin_ns: int
    end_ns: int
