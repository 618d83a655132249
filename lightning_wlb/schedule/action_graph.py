"""The graph behind a simulation: which action waits for which (SlimPack §4.3).

An action waits for the one before it in its rank's program and for the one whose message it needs:
a forward for that of the stage before, a backward for that of the stage after, and the last
stage's backward for its own forward. Programs may be any lists of actions. A topological order of
the actions exists if and only if the programs do not deadlock when sends are buffered; the tests
prove more of the schedules, that they need no buffers (``tests/schedule/proof.py``).

Making a graph is linear in the number of actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action

Programs = Sequence[Sequence[Action]]
"""One program for each rank of a pipeline."""

NONE = -1
"""The number of no action."""


class Graph:
    """The actions of one pipeline, numbered rank by rank in program order, and their order.

    Args:
        programs: one for each rank.

    Raises:
        ValueError: if the programs deadlock, need an action that no rank runs, list an action
            twice, or put a stage on two ranks.

    Attributes:
        actions: by number.
        ranks: the numbers of each rank's actions.
        needed: by number, the action whose output it needs, or NONE.
        runs: (first, stop, the number before first on its rank, or NONE): consecutive numbers of
            one rank. The runs in their order are a topological order of the actions.
        received: numbers of the actions whose message comes from another rank.
        forwards: numbers of the forwards.
        frees: by number, the forward whose bytes are free when the action has ended, or NONE.
    """

    def __init__(self, programs: Programs) -> None:
        self.actions: list[Action] = list(chain.from_iterable(programs))
        self.ranks: list[range] = []
        for program in programs:
            start = self.ranks[-1].stop if self.ranks else 0
            self.ranks.append(range(start, start + len(program)))
        # Actions are equal to plain tuples, which are several times faster to make.
        numbers: dict[tuple[int, str, int], int] = {
            action: number for number, action in enumerate(self.actions)
        }
        _check_places(programs, self.actions, len(numbers))
        last = max((stage for stage, _, _ in self.actions), default=0)
        self.needed: list[int] = []
        self.frees = [NONE] * len(self.actions)
        self.forwards: list[int] = []
        try:
            for number, (stage, kind, micro_batch) in enumerate(self.actions):
                if kind == FORWARD:
                    self.forwards.append(number)
                    source = numbers[stage - 1, FORWARD, micro_batch] if stage else NONE
                else:
                    source = self.frees[number] = numbers[stage, FORWARD, micro_batch]
                    if stage < last:
                        source = numbers[stage + 1, BACKWARD, micro_batch]
                self.needed.append(source)
        except KeyError as error:
            raise ValueError(
                f"the schedule cannot run: {self.actions[number]} needs {Action(*error.args[0])},"
                " which no rank runs."
            ) from None
        with_backward = set(self.frees)
        for number in self.forwards:
            if number not in with_backward:
                self.frees[number] = number
        self.runs = self._sort()
        self.received = [
            number
            for own in self.ranks
            for number in own
            if self.needed[number] != NONE and self.needed[number] not in own
        ]

    def _sort(self) -> list[tuple[int, int, int]]:
        """The runs: each rank goes as far as it can, and then waits until an action is done."""
        needed = self.needed
        runs: list[tuple[int, int, int]] = []
        done = bytearray(len(needed))
        at = [own.start for own in self.ranks]
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(self.ranks)))
        while ready:
            rank = ready.pop()
            first = number = at[rank]
            stop = self.ranks[rank].stop
            while number < stop:
                source = needed[number]
                if source != NONE and not done[source]:
                    waiting.setdefault(source, []).append(rank)
                    break
                done[number] = True
                if number in waiting:
                    ready += waiting.pop(number)
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
    """Every action is listed once, and every stage is on one rank."""
    if different < len(actions):
        twice = next(action for action, count in Counter(actions).items() if count > 1)
        raise ValueError(f"the schedule lists {twice} twice.")
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for stage in {action[0] for action in program}:
            if rank_of.setdefault(stage, rank) != rank:
                raise ValueError(
                    f"stage {stage} is on ranks {rank_of[stage]} and {rank}; a stage lives on one."
                )
