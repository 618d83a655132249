"""Actions: what a pipeline rank does, as data that prints and parses.

An action is written ``2F0``: stage 2 runs the forward of micro-batch 0; ``2B0`` is its backward. A
*program* is the list of actions of one rank, a *schedule* the programs of all ranks of one
pipeline. Stages are numbered over the whole pipeline; stage s is on rank s % ranks. Sends and
receives are not written down, because they follow from the actions: a forward begins with a
receive from the stage before, if there is one, and ends with a send to the stage after, if there
is one; a backward does so the other way round. Between two stages of one rank nothing is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

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
            ValueError: the text is not an action.
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
    """Which messages share a process group, and so a queue on each rank."""

    kind: Kind
    closes_ring: bool


def source_of(action: Action, stages: int) -> Action | None:
    """The action whose message ``action`` needs among ``stages`` stages of all ranks, or None.

    A forward needs that of the stage before, a backward that of the stage after; the last stage's
    backward needs only the forward on its own rank.
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
