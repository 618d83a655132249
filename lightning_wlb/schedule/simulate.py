"""Predicts how long a step takes: the critical path through its actions (SlimPack §4.3).

An action begins when its rank has finished the action before it and its input has arrived: the
message of the neighbouring stage, which takes ``transfer`` after the action that sends it ends, or
on the same rank nothing. (The last stage's backward needs its own forward.) Programs are arbitrary
lists; what an action needs follows from the action itself. One pass in topological order gives
every time, in exact integers: linear in the number of actions, 1 to 2 µs each in plain Python
(``benchmarks/simulator_scale.py``). Replicas and steps with the same programs share their graph.

When the last action of the last replica has ended, gradients are synchronised: the executor sums
the loss over all ranks before it reduces gradients, so no rank starts early.

Left out, so a prediction is a lower bound in these respects: messages do not share links and do
not occupy the rank's compute; a send needs no partner that is ready (no rendezvous); ranks do not
slow each other down.

Memory: a forward opens bytes when it begins, its backward frees them when it ends; a forward
without a backward in its program (an evaluation) frees its own. Besides, an action may leave bytes
that another one frees (gradients of an earlier slice's keys, messages on their way). A constant per
rank is added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from operator import index as as_integer
from typing import NamedTuple

from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.schedule.graph import NONE, Graph, Programs, graph_of
from lightning_wlb.schedule.timeline import Span


class Simulation:
    """The predicted step of one pipeline. Times are integer ns from the start of the step.

    Attributes:
        compute_ns: when the last action of the step ends, on this or on another replica.
        synchronisation_ns: how long gradients are synchronised after that.
    """

    def __init__(
        self, run: _Run, constant: Sequence[int], compute_ns: int, synchronisation_ns: int
    ) -> None:
        """Made by :func:`simulate` and :func:`simulate_replicas`."""
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
    def idle_ns(self) -> tuple[int, ...]:
        """For each rank the time before synchronisation in which it runs no action: its bubble.

        Where several replicas were simulated it includes the wait for the slowest.
        """
        return tuple(self.compute_ns - busy for busy in self.busy_ns)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank its changes: (time in ns, bytes held from then on), from time 0 on."""
        return tuple(
            tuple(self._changes(numbers, constant))
            for numbers, constant in zip(self._graph.ranks, self._constant, strict=True)
        )

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each rank the most bytes that it ever holds."""
        return tuple(max(held for _, held in changes) for changes in self.memory)

    @cached_property
    def held_bytes(self) -> tuple[tuple[int, ...], ...]:
        """For each rank what it holds while each action runs, in the order of its program."""
        result = []
        for numbers, held in zip(self._graph.ranks, self._constant, strict=True):
            of_rank = []
            for number in numbers:
                held += self._opened[number]
                of_rank.append(held)
                held -= self._freed[number]
            result.append(tuple(of_rank))
        return tuple(result)

    def _changes(self, numbers: range, held: int) -> list[tuple[int, int]]:
        changes = [(0, held)]
        for number in numbers:
            if self._opened[number]:
                held += self._opened[number]
                changes.append((self._begin[number], held))
            if self._freed[number]:
                held -= self._freed[number]
                changes.append((self._end[number], held))
        return changes


def simulate(
    programs: Programs,
    duration: Callable[[Action], int],
    transfer: Callable[[Action], int] | None = None,
    *,
    opened_bytes: Callable[[Action], int] | None = None,
    freed_bytes: Callable[[Action], int] | None = None,
    constant_bytes: Sequence[int] | None = None,
    synchronisation_ns: int = 0,
) -> Simulation:
    """Simulate the step of one pipeline.

    Args:
        programs: one for each rank, see :mod:`lightning_wlb.schedule.programs`.
        duration: how long an action computes, in ns.
        transfer: how long the message that an action needs travels, in ns; asked only for actions
            whose message comes from another rank. None: no time.
        opened_bytes: what a forward opens until its backward has run; asked only for forwards.
            None: nothing.
        freed_bytes: what an action frees of what others have left, less what it leaves to others:
            a forward when it begins, a backward when it has run. None: nothing.
        constant_bytes: what each rank holds all along. None: nothing.
        synchronisation_ns: how long gradients are synchronised at the end.

    Raises:
        ValueError: if the programs deadlock (naming the ranks that wait for each other, and for
            what), list an action twice or put a stage on two ranks, or if a number is negative.
        TypeError: if a number is not an integer.
    """
    run = _run(graph_of(tuple(map(tuple, programs))), duration, transfer, opened_bytes, freed_bytes)
    return _close([run], constant_bytes, synchronisation_ns)[0]


def simulate_replicas(
    programs: Sequence[Programs],
    duration: Callable[[int, Action], int],
    transfer: Callable[[int, Action], int] | None = None,
    *,
    opened_bytes: Callable[[int, Action], int] | None = None,
    freed_bytes: Callable[[int, Action], int] | None = None,
    constant_bytes: Sequence[int] | None = None,
    synchronisation_ns: int = 0,
    shared: Callable[[int, Action], Hashable] | None = None,
) -> list[Simulation]:
    """Simulate the step of several replicas, which end together.

    Args:
        programs: for each replica what :func:`simulate` takes.
        duration: of (replica, action), otherwise as for :func:`simulate`; so are the others.
        transfer: of (replica, action).
        opened_bytes: of (replica, action).
        freed_bytes: of (replica, action).
        constant_bytes: of each rank, the same for all replicas.
        synchronisation_ns: begins when the slowest replica has computed.
        shared: of (replica, action), what the action is called on all replicas that run it
            together (DP-Merge), and then begin it together; None for an action of one replica.

    Returns:
        One simulation for each replica; ``compute_ns`` and ``total_ns`` are those of the step.

    Raises:
        ValueError: as :func:`simulate`, and if replicas wait for each other in shared actions.
        TypeError: as :func:`simulate`.
    """
    runs = []
    for replica, of_replica in enumerate(programs):
        runs.append(
            _run(
                graph_of(tuple(map(tuple, of_replica))),
                partial(duration, replica),
                None if transfer is None else partial(transfer, replica),
                None if opened_bytes is None else partial(opened_bytes, replica),
                None if freed_bytes is None else partial(freed_bytes, replica),
            )
        )
    if shared is not None:
        runs = _together(runs, shared)
    return _close(runs, constant_bytes, synchronisation_ns)


class _Run(NamedTuple):
    """A graph with the times and bytes of its actions, by number.

    Attributes:
        opened: when the action begins, less what it frees then.
        freed: when it ends; negative where it leaves more than it frees.
    """

    graph: Graph
    begin: list[int]
    end: list[int]
    opened: list[int]
    freed: list[int]
    transfers: list[int]


def _together(runs: list[_Run], shared: Callable[[int, Action], Hashable]) -> list[_Run]:
    """The same runs, in which shared actions begin when all that share them can.

    Repeated until nothing moves: times only grow, and of the shared actions whose time is not
    final yet, each round makes that of the first one so. If there are more rounds than that, the
    replicas wait for each other.
    """
    names: dict[Hashable, list[tuple[int, int]]] = {}
    for replica, run in enumerate(runs):
        for number, action in enumerate(run.graph.actions):
            name = shared(replica, action)
            if name is not None:
                names.setdefault(name, []).append((replica, number))
    earliest = [[0] * len(run.begin) for run in runs]
    durations = [
        [end - begin for begin, end in zip(run.begin, run.end, strict=True)] for run in runs
    ]
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
            times = _times(run.graph, durations[replica], run.transfers, earliest[replica])
            runs[replica] = run._replace(begin=times[0], end=times[1])
    raise ValueError("the schedules deadlock: replicas wait for each other in shared actions.")


def _run(
    graph: Graph,
    duration: Callable[[Action], int],
    transfer: Callable[[Action], int] | None,
    opened_bytes: Callable[[Action], int] | None,
    freed_bytes: Callable[[Action], int] | None,
) -> _Run:
    """Every action's begin and end, from those it waits for."""
    count = len(graph.actions)
    durations = _integers("duration", duration, graph, range(count))
    transfers, opened = [0] * count, [0] * count
    if transfer is not None:
        transfers = _integers("transfer", transfer, graph, graph.received)
    if opened_bytes is not None:
        opened = _integers("opened_bytes", opened_bytes, graph, graph.forwards)
    freed = [0 if forward == NONE else opened[forward] for forward in graph.frees]
    if freed_bytes is not None:
        for number, action in enumerate(graph.actions):
            size = as_integer(freed_bytes(action))
            if action.kind == FORWARD:
                opened[number] -= size
            else:
                freed[number] += size
    begin, end = _times(graph, durations, transfers, None)
    return _Run(graph, begin, end, opened, freed, transfers)


def _times(
    graph: Graph, durations: list[int], transfers: list[int], earliest: list[int] | None
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
            if earliest is not None and earliest[number] > now:
                now = earliest[number]
            begin[number] = now
            now += durations[number]
            end[number] = now
    end.pop()
    return begin, end


def _integers(
    name: str, function: Callable[[Action], int], graph: Graph, numbers: Sequence[int]
) -> list[int]:
    """By action number, what the function says; 0 where it is not asked."""
    result = [0] * len(graph.actions)
    for number in numbers:
        result[number] = as_integer(function(graph.actions[number]))
    if result and min(result) < 0:
        action = graph.actions[result.index(min(result))]
        raise ValueError(f"{name} of {action} is {min(result)}; it cannot be negative.")
    return result


def _close(
    runs: list[_Run], constant_bytes: Sequence[int] | None, synchronisation_ns: int
) -> list[Simulation]:
    """All replicas compute until the slowest has, and then synchronise."""
    compute_ns = max((max(run.end, default=0) for run in runs), default=0)
    simulations = []
    for run in runs:
        ranks = len(run.graph.ranks)
        constant = [0] * ranks if constant_bytes is None else list(constant_bytes)
        if len(constant) != ranks:
            raise ValueError(f"constant_bytes has {len(constant)} entries for {ranks} ranks.")
        simulations.append(Simulation(run, constant, compute_ns, synchronisation_ns))
    return simulations
