"""The graph behind a simulation: which action waits for which (SlimPack §4.3).

An action waits for the one before it in its rank's program and for the one whose message it needs:
a forward for the stage before, a backward for the stage after, the last stage's backward for its
own forward. Programs are arbitrary lists; a topological order of their actions exists if and only
if they do not deadlock when sends are buffered. (:func:`~lightning_wlb.schedule.actions
.check_schedule` proves more: that they need no buffers.) Linear in the number of actions, under
1 µs each in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action

Programs = Sequence[Sequence[Action]]
"""One program for each rank of a pipeline."""

NONE = -1
"""In place of the number of an action: there is none."""


class Graph:
    """The actions of one pipeline, numbered rank by rank in program order, and their order.

    Args:
        programs: one for each rank; any lists of actions.

    Raises:
        ValueError: if they deadlock, need an action that no rank runs, list one twice, or put a
            stage on two ranks.

    Attributes:
        actions: by number.
        ranks: the numbers of each rank's actions.
        order: (number, the one before it on its rank, the one whose output it needs), in
            topological order; NONE where there is none.
        received: numbers of the actions whose message comes from another rank.
        forwards: numbers of the forwards.
        frees: by number, the forward whose bytes are free when the action has ended.
    """

    def __init__(self, programs: Programs) -> None:
        self.actions: list[Action] = list(chain.from_iterable(programs))
        self.ranks: list[range] = []
        for program in programs:
            start = self.ranks[-1].stop if self.ranks else 0
            self.ranks.append(range(start, start + len(program)))
        # Keys compare equal to actions; a bare tuple is several times faster to make.
        numbers: dict[tuple[int, str, int], int] = {
            action: number for number, action in enumerate(self.actions)
        }
        _check_places(programs, self.actions, len(numbers))
        last = max((stage for stage, _, _ in self.actions), default=0)
        needed: list[int] = []
        missing: dict[int, Action] = {}
        self.frees: list[int] = []
        self.forwards: list[int] = []
        find = numbers.get
        for number, (stage, kind, micro_batch) in enumerate(self.actions):
            if kind == FORWARD:
                source = find((stage - 1, FORWARD, micro_batch), NONE)
                if source == NONE and stage > 0:
                    missing[number] = Action(stage - 1, FORWARD, micro_batch)
                self.forwards.append(number)
                self.frees.append(NONE if (stage, BACKWARD, micro_batch) in numbers else number)
            else:
                own = find((stage, FORWARD, micro_batch), NONE)
                source = own if stage == last else find((stage + 1, BACKWARD, micro_batch), NONE)
                if own == NONE:
                    missing[number] = Action(stage, FORWARD, micro_batch)
                elif source == NONE:
                    missing[number] = Action(stage + 1, BACKWARD, micro_batch)
                self.frees.append(own)
            needed.append(source)
        if missing:
            number = min(missing)
            raise ValueError(
                f"the schedule cannot run: {self.actions[number]} needs {missing[number]}, which"
                " no rank runs."
            )
        self.order = self._sort(needed)
        rank_of = [rank for rank, own in enumerate(self.ranks) for _ in own]
        self.received = [
            number
            for number, source in enumerate(needed)
            if source != NONE and rank_of[source] != rank_of[number]
        ]

    def _sort(self, needed: list[int]) -> list[tuple[int, int, int]]:
        """Each rank goes as far as it can; whoever it waits for wakes it."""
        order: list[tuple[int, int, int]] = []
        done = bytearray(len(needed))
        at = [own.start for own in self.ranks]
        asleep: dict[int, list[int]] = {}
        awake = list(range(len(self.ranks)))
        while awake:
            rank = awake.pop()
            number, stop = at[rank], self.ranks[rank].stop
            previous = number - 1 if number > self.ranks[rank].start else NONE
            while number < stop:
                source = needed[number]
                if source != NONE and not done[source]:
                    asleep.setdefault(source, []).append(rank)
                    break
                order.append((number, previous, source))
                done[number] = True
                if number in asleep:
                    awake += asleep.pop(number)
                previous = number
                number += 1
            at[rank] = number
        if len(order) < len(needed):
            raise ValueError(self._explain(at, needed))
        return order

    def _explain(self, at: list[int], needed: list[int]) -> str:
        """The circle of ranks that wait for each other, and how many wait for them."""
        stuck = [rank for rank, own in enumerate(self.ranks) if at[rank] < own.stop]
        wanted_from = {
            rank: next(other for other in stuck if needed[at[rank]] in self.ranks[other])
            for rank in stuck
        }
        path = [stuck[0]]
        while (following := wanted_from[path[-1]]) not in path:
            path.append(following)
        circle = path[path.index(following) :]
        reasons = [
            f"rank {rank} waits at {self.actions[at[rank]]} for {self.actions[needed[at[rank]]]},"
            f" which rank {wanted_from[rank]} runs only after"
            f" {self.actions[at[wanted_from[rank]]]}"
            for rank in circle
        ]
        others = [rank for rank in stuck if rank not in circle]
        if others:
            reasons.append(f"ranks {', '.join(map(str, others))} wait for these")
        return "the schedule deadlocks: " + "; ".join(reasons) + "."


def _check_places(programs: Programs, actions: Sequence[Action], different: int) -> None:
    """Every action once, every stage on one rank."""
    if different < len(actions):
        seen: set[Action] = set()
        for action in actions:
            if action in seen:
                raise ValueError(f"the schedule lists {action} twice.")
            seen.add(action)
    homes: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for stage in {action[0] for action in program}:
            if homes.setdefault(stage, rank) != rank:
                raise ValueError(
                    f"stage {stage} is on ranks {homes[stage]} and {rank}; a stage lives on one."
                )
