"""Predicts how long a step takes: the critical path through its actions (SlimPack §4.3).

An action begins when its rank has finished the action before it and when its input has arrived: at
the end of the action that it needs (:mod:`~lightning_wlb.schedule.action_graph`), plus ``transfer``
if that one ran on another rank. One pass in topological order gives every time in exact integers;
its cost is linear in the actions. Replicas and steps with the same programs share their graph.

Parameters and gradients bound the actions: the first forward of a stage does not run before
``begins``, when its parameters have been gathered, and the step does not end before ``reduced``,
when the gradients of the last backwards have been reduced.

A prediction is a lower bound in three respects: messages do not share links and do not occupy the
rank's compute; a send does not wait for its receive; ranks do not slow each other down.

Memory: each rank holds constant bytes. A forward opens bytes when it begins, and its backward frees
them when it ends; a forward without a backward (an evaluation) frees its own. Bytes that one action
leaves behind and another one frees (gradients of an earlier slice's keys, messages not yet
received) are added by ``freed_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import index as as_integer
from typing import NamedTuple

from lightning_wlb.schedule.action_graph import NONE, Graph, Programs, graph_of
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, Span

_Function = Callable[[int, Action], int]
"""An integer for (replica, action)."""


class Simulation:
    """The predicted step of one pipeline. Times are integer ns from the start of the step.

    Attributes:
        compute_ns: when the last action of the step ends, on this or on another replica.
        synchronisation_ns: how long the step goes on after that: gradients that are still sent, and
            what follows them.
    """

    def __init__(
        self, run: _SimulatedRun, constant: Sequence[int], compute_ns: int, synchronisation_ns: int
    ) -> None:
        """Make the result of one replica, for :func:`.simulate_replicas`."""
        self._graph, self._begin, self._end, self._opened, self._freed = run[:5]
        self._constant = constant
        self.compute_ns = compute_ns
        self.synchronisation_ns = synchronisation_ns

    @property
    def total_ns(self) -> int:
        """The step time, synchronisation included."""
        return self.compute_ns + self.synchronisation_ns

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank its actions with begin and end, in the order of its program."""
        every = list(map(Span, self._graph.actions, self._begin, self._end))
        return tuple(tuple(every[numbers.start : numbers.stop]) for numbers in self._graph.ranks)

    @cached_property
    def busy_ns(self) -> tuple[int, ...]:
        """For each rank the time that it spends in actions."""
        return tuple(
            sum(self._end[numbers.start : numbers.stop])
            - sum(self._begin[numbers.start : numbers.stop])
            for numbers in self._graph.ranks
        )

    @cached_property
    def begin_ns(self) -> int:
        """When the first action of this pipeline begins, which may wait for its parameters."""
        return min(self._begin, default=0)

    @cached_property
    def idle_ns(self) -> tuple[int, ...]:
        """For each rank the time in which it runs no action: its bubble.

        It counts from the first action of this pipeline to the last one of all: where several
        replicas were simulated it includes the wait for the slowest.
        """
        whole = self.compute_ns - self.begin_ns
        return tuple(whole - busy for busy in self.busy_ns)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank its changes: (time in ns, bytes held from then on), from time 0 on."""
        result = []
        for numbers, held in zip(self._graph.ranks, self._constant, strict=True):
            changes = [(0, held)]
            for number, during, after in self._held(numbers, held):
                if self._opened[number]:
                    changes.append((self._begin[number], during))
                if self._freed[number]:
                    changes.append((self._end[number], after))
            result.append(tuple(changes))
        return tuple(result)

    @cached_property
    def held_bytes(self) -> tuple[tuple[int, ...], ...]:
        """For each rank what it holds while each action runs, in the order of its program."""
        return tuple(
            tuple(during for _, during, _ in self._held(numbers, constant))
            for numbers, constant in zip(self._graph.ranks, self._constant, strict=True)
        )

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each rank the most bytes that it ever holds."""
        return tuple(
            max([constant, *(max(held) for _, *held in self._held(numbers, constant))])
            for numbers, constant in zip(self._graph.ranks, self._constant, strict=True)
        )

    def _held(self, numbers: range, held: int) -> Iterator[tuple[int, int, int]]:
        """(action, bytes held while it runs, bytes held after it) of a rank's actions."""
        for number in numbers:
            held += self._opened[number]
            yield number, held, held - self._freed[number]
            held -= self._freed[number]


def simulate_replicas(
    programs: Sequence[Programs],
    duration: _Function,
    transfer: _Function | None = None,
    *,
    opened_bytes: _Function | None = None,
    freed_bytes: _Function | None = None,
    constant_bytes: Sequence[int] | None = None,
    begins: _Function | None = None,
    reduced: Callable[[Mapping[int, Sequence[tuple[int, int]]]], int] | None = None,
    synchronisation_ns: int = 0,
    shared: Callable[[int, Action], Hashable] | None = None,
) -> list[Simulation]:
    """Simulate the step of several replicas, which end together.

    The functions are given (replica, action); where one is None, it is 0 for every action.

    Args:
        programs: for each replica one program for each of its ranks
            (:mod:`~lightning_wlb.schedule.programs`).
        duration: how long the action computes, in ns.
        transfer: how long the message that the action needs takes, in ns. Called only for actions
            whose message comes from another rank.
        opened_bytes: what a forward opens until its backward has run. Called only for forwards.
        freed_bytes: what other actions left and this one frees, minus what this one leaves for
            others. A forward frees it when it begins, a backward when it ends.
        constant_bytes: what each rank holds all the time, the same for all replicas; None: 0.
        begins: the earliest begin of an action. Called only for the first forward of each stage.
        reduced: given (end, duration) of the last backward on each stage, of each replica that has
            one, when the gradients have arrived.
        synchronisation_ns: how long the step goes on after that and after the last action.
        shared: the name of the action on all replicas that run it together (DP-Merge) and that
            begin it together; None for an action of one replica.

    Returns:
        One simulation for each replica; ``compute_ns`` and ``total_ns`` are those of the step.

    Raises:
        ValueError: if the programs deadlock (naming the ranks that wait for each other, and for
            what), list an action twice or put a stage on two ranks, if replicas wait for each
            other in shared actions, or if a number is negative.
        TypeError: if a number is not an integer.
    """
    runs = [
        _run(replica, of_replica, duration, transfer, opened_bytes, freed_bytes, begins)
        for replica, of_replica in enumerate(programs)
    ]
    if shared is not None:
        runs = _begin_together(runs, shared)
    compute_ns = max((max(run.end, default=0) for run in runs), default=0)
    if reduced is not None:
        synchronisation_ns += max(reduced(_last_backwards(runs)) - compute_ns, 0)
    simulations = []
    for run in runs:
        ranks = len(run.graph.ranks)
        constant = [0] * ranks if constant_bytes is None else list(constant_bytes)
        if len(constant) != ranks:
            raise ValueError(f"constant_bytes has {len(constant)} entries for {ranks} ranks.")
        simulations.append(Simulation(run, constant, compute_ns, synchronisation_ns))
    return simulations


class _SimulatedRun(NamedTuple):
    """A graph with the times and bytes of its actions, by number.

    Attributes:
        opened: bytes that are held from the action's begin on, less those that it frees then.
        freed: bytes that are free from its end on; negative where it leaves more than it frees.
        earliest: the time before which the action cannot begin.
    """

    graph: Graph
    begin: list[int]
    end: list[int]
    opened: list[int]
    freed: list[int]
    durations: list[int]
    transfers: list[int]
    earliest: list[int]


def _run(
    replica: int,
    programs: Programs,
    duration: _Function,
    transfer: _Function | None,
    opened_bytes: _Function | None,
    freed_bytes: _Function | None,
    begins: _Function | None,
) -> _SimulatedRun:
    """Simulate one replica as if it shared no action with others."""
    graph = graph_of(tuple(map(tuple, programs)))
    durations = _integers("duration", duration, replica, graph, range(len(graph.actions)))
    transfers = _integers("transfer", transfer, replica, graph, graph.received)
    opened = _integers("opened_bytes", opened_bytes, replica, graph, graph.forwards)
    freed = [0 if forward == NONE else opened[forward] for forward in graph.frees]
    if freed_bytes is not None:
        for number, action in enumerate(graph.actions):
            size = as_integer(freed_bytes(replica, action))
            if action.kind == FORWARD:
                opened[number] -= size
            else:
                freed[number] += size
    firsts = {graph.actions[number].stage: number for number in reversed(graph.forwards)}
    earliest = _integers("begins", begins, replica, graph, list(firsts.values()))
    begin, end = _times(graph, durations, transfers, earliest)
    return _SimulatedRun(graph, begin, end, opened, freed, durations, transfers, earliest)


def _last_backwards(runs: Sequence[_SimulatedRun]) -> dict[int, list[tuple[int, int]]]:
    """By stage, (end, duration) of the last backward of each replica that has one."""
    last: dict[int, list[tuple[int, int]]] = {}
    for run in runs:
        numbers = {
            action.stage: number
            for number, action in enumerate(run.graph.actions)
            if action.kind == BACKWARD
        }
        for stage, number in numbers.items():
            last.setdefault(stage, []).append((run.end[number], run.durations[number]))
    return last


def _integers(
    name: str, function: _Function | None, replica: int, graph: Graph, numbers: Sequence[int]
) -> list[int]:
    """What the function returns, by action number; 0 for actions that it is not called for."""
    result = [0] * len(graph.actions)
    if function is None:
        return result
    for number in numbers:
        result[number] = as_integer(function(replica, graph.actions[number]))
    if result and min(result) < 0:
        action = graph.actions[result.index(min(result))]
        raise ValueError(f"{name} of {action} is {min(result)}; it cannot be negative.")
    return result


def _times(
    graph: Graph, durations: list[int], transfers: list[int], earliest: list[int]
) -> tuple[list[int], list[int]]:
    """Begin and end of every action, by number; none begins before ``earliest``."""
    count = len(graph.actions)
    begin = [0] * count
    end = [0] * (count + 1)  # The last entry is time 0, where NONE points.
    needed = graph.needed
    for first, stop, previous in graph.runs:
        now = end[previous]
        for number in range(first, stop):
            arrival = end[needed[number]] + transfers[number]
            if arrival > now:
                now = arrival
            if earliest[number] > now:
                now = earliest[number]
            begin[number] = now
            now += durations[number]
            end[number] = now
    end.pop()
    return begin, end


def _begin_together(
    runs: list[_SimulatedRun], shared: Callable[[int, Action], Hashable]
) -> list[_SimulatedRun]:
    """The same runs, with each shared action beginning at the same time on all its replicas.

    Every round delays each shared action to its latest begin on any replica, until nothing moves.
    Times only grow, and each round makes the time of at least one more shared action final. If
    there are more rounds than shared actions, the replicas wait for each other for ever.
    """
    names: dict[Hashable, list[tuple[int, int]]] = {}
    for replica, run in enumerate(runs):
        for number, action in enumerate(run.graph.actions):
            name = shared(replica, action)
            if name is not None:
                names.setdefault(name, []).append((replica, number))
    earliest = [list(run.earliest) for run in runs]
    for _ in range(len(names) + 1):
        moved: set[int] = set()
        for places in names.values():
            begin = max(runs[replica].begin[number] for replica, number in places)
            for replica, number in places:
                if runs[replica].begin[number] < begin:
                    earliest[replica][number] = begin
                    moved.add(replica)
        if not moved:
            return runs
        for replica in moved:
            run = runs[replica]
            times = _times(run.graph, run.durations, run.transfers, earliest[replica])
            runs[replica] = run._replace(begin=times[0], end=times[1])
    raise ValueError("the schedules deadlock: replicas wait for each other in shared actions.")
