"""The graph behind a simulation: which action waits for which (SlimPack §4.3).

An action waits for the one before it in its rank's program and for the one whose message it needs:
a forward for the stage before, a backward for the stage after, the last stage's backward for its
own forward. Programs are arbitrary lists; a topological order of their actions exists if and only
if they do not deadlock when sends are buffered. (:func:`.check_schedule` proves more: that they
need no buffers.) Linear in the number of actions, under 1 µs each in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NoReturn

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
        needed: by number, the action whose output it needs; NONE where there is none.
        runs: (first, stop, the number before first on its rank, or NONE): consecutive numbers of
            a rank; one run after the other is a topological order.
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
        self.needed: list[int] = []
        self.frees = [NONE] * len(self.actions)
        self.forwards: list[int] = []
        find = numbers.get
        for number, (stage, kind, micro_batch) in enumerate(self.actions):
            if kind == FORWARD:
                self.forwards.append(number)
                source = find((stage - 1, FORWARD, micro_batch), NONE)
                if source == NONE and stage > 0:
                    self._miss(number, Action(stage - 1, FORWARD, micro_batch))
            else:
                own = find((stage, FORWARD, micro_batch), NONE)
                if own == NONE:
                    self._miss(number, Action(stage, FORWARD, micro_batch))
                self.frees[number] = own
                source = own if stage == last else find((stage + 1, BACKWARD, micro_batch), NONE)
                if source == NONE:
                    self._miss(number, Action(stage + 1, BACKWARD, micro_batch))
            self.needed.append(source)
        kept = set(self.frees)
        for number in self.forwards:
            if number not in kept:
                self.frees[number] = number
        self.runs = self._sort()
        rank_of = [rank for rank, own in enumerate(self.ranks) for _ in own]
        self.received = [
            number
            for number, source in enumerate(self.needed)
            if source != NONE and rank_of[source] != rank_of[number]
        ]

    def _miss(self, number: int, wanted: Action) -> NoReturn:
        raise ValueError(
            f"the schedule cannot run: {self.actions[number]} needs {wanted}, which no rank runs."
        )

    def _sort(self) -> list[tuple[int, int, int]]:
        """Each rank goes as far as it can; whoever it waits for wakes it."""
        needed = self.needed
        runs: list[tuple[int, int, int]] = []
        done = bytearray(len(needed))
        at = [own.start for own in self.ranks]
        asleep: dict[int, list[int]] = {}
        awake = list(range(len(self.ranks)))
        while awake:
            rank = awake.pop()
            first = number = at[rank]
            stop = self.ranks[rank].stop
            while number < stop:
                source = needed[number]
                if source != NONE and not done[source]:
                    asleep.setdefault(source, []).append(rank)
                    break
                done[number] = True
                if number in asleep:
                    awake += asleep.pop(number)
                number += 1
            if number > first:
                previous = first - 1 if first > self.ranks[rank].start else NONE
                runs.append((first, number, previous))
            at[rank] = number
        if not all(done):
            raise ValueError(self._explain(at))
        return runs

    def _explain(self, at: list[int]) -> str:
        """The circle of ranks that wait for each other, and how many wait for them."""
        stuck = [rank for rank, own in enumerate(self.ranks) if at[rank] < own.stop]
        wanted_from = {
            rank: next(other for other in stuck if self.needed[at[rank]] in self.ranks[other])
            for rank in stuck
        }
        path = [stuck[0]]
        while (following := wanted_from[path[-1]]) not in path:
            path.append(following)
        circle = path[path.index(following) :]
        reasons = [
            f"rank {rank} waits at {self.actions[at[rank]]} for"
            f" {self.actions[self.needed[at[rank]]]}, which rank {wanted_from[rank]} runs only"
            f" after {self.actions[at[wanted_from[rank]]]}"
            for rank in circle
        ]
        others = [rank for rank in stuck if rank not in circle]
        if others:
            reasons.append(f"ranks {', '.join(map(str, others))} wait for these")
        return "the schedule deadlocks: " + "; ".join(reasons) + "."


@lru_cache(maxsize=64)
def graph_of(programs: tuple[tuple[Action, ...], ...]) -> Graph:
    """The graph of some programs; steps of the same shape share it, so do not change it."""
    return Graph(programs)


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
