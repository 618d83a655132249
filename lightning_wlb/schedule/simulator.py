"""Predicts how long a step takes: the critical path through its actions (SlimPack §4.3).

An action begins when its rank has ended the action before it and when its input has arrived: a
forward needs the message of the stage before, a backward that of the stage after, and the last
stage's backward its own forward. Every rank runs as far as it can, and goes on when the action that
it waits for has ended, which gives all times in exact integers. Programs may be any lists of
actions. They deadlock here if and only if they deadlock with buffered sends; the tests prove that
the package's schedules do not deadlock even without buffers (``tests/schedule/proof.py``).

Parameters and gradients bound the actions: the first forward of a stage does not begin before its
parameters have been gathered (``begins``), and the step does not end before the gradients of the
last backwards have been reduced (``reduced``).

A prediction is a lower bound in three respects: messages do not share links and do not occupy the
rank's compute; a send does not wait for its receive; ranks do not slow each other down.

Cost: about 1 µs for an action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, Span

Programs = Sequence[Sequence[Action]]
"""One program for each rank of a pipeline."""

LastBackward = tuple[int, int]
"""The end of a replica's last backward on a stage, and its duration, in ns."""

_Function = Callable[[int, Action], int]
"""An integer for (replica, action)."""

_Key = tuple[int, str, int]
"""An action as a plain tuple, which is equal to it and several times faster to make."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """The predicted step of one pipeline. Times are integer ns from the start of the step."""

    #: each rank's actions with begin and end, in the order of its program
    spans: Sequence[Sequence[Span]]
    #: the bytes that each action allocates at its begin (forward) or frees at its end (backward)
    changes: Sequence[Sequence[int]]
    constant_bytes: Sequence[int]  #: what each rank holds all the time
    compute_ns: int  #: when the last action of the step ends, on this or on another replica
    #: how long the step goes on after ``compute_ns``: rest of the gradient reduction and optimizer
    synchronisation_ns: int

    @property
    def total_ns(self) -> int:
        """The step time, synchronisation included."""
        return self.compute_ns + self.synchronisation_ns

    @cached_property
    def busy_ns(self) -> tuple[int, ...]:
        """For each rank the time that it spends in actions."""
        return tuple(sum(end - begin for _, begin, end in of_rank) for of_rank in self.spans)

    @cached_property
    def begin_ns(self) -> int:
        """The begin of this pipeline's first action, which may wait for parameters."""
        return min((of_rank[0].begin_ns for of_rank in self.spans if of_rank), default=0)

    @cached_property
    def idle_ns(self) -> tuple[int, ...]:
        """For each rank the time in which it runs no action: its bubble.

        It counts from the first action of this pipeline to the last action of all pipelines, so
        with several replicas it includes the wait for the slowest.
        """
        whole = self.compute_ns - self.begin_ns
        return tuple(whole - busy for busy in self.busy_ns)

    @cached_property
    def held_bytes(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the bytes that it holds during each action, in the order of its program."""
        result = []
        for spans, changes, held in zip(self.spans, self.changes, self.constant_bytes, strict=True):
            of_rank = []
            for ((_, kind, _), _, _), change in zip(spans, changes, strict=True):
                of_rank.append(held + change if kind == FORWARD else held)
                held += change if kind == FORWARD else -change
            result.append(tuple(of_rank))
        return tuple(result)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each rank the most bytes that it holds."""
        every = zip(self.constant_bytes, self.held_bytes, strict=True)
        return tuple(max([constant, *held]) for constant, held in every)


def simulate_replicas(
    programs: Sequence[Programs],
    duration: _Function,
    transfer: _Function = lambda replica, action: 0,
    *,
    changed_bytes: _Function = lambda replica, action: 0,
    constant_bytes: Sequence[int] = (),
    begins: _Function = lambda replica, action: 0,
    reduced: Callable[[Mapping[int, Sequence[LastBackward]]], int] = lambda last: 0,
    synchronisation_ns: int = 0,
    sharers: Sequence[Sequence[tuple[int, ...]]] = (),
) -> list[Simulation]:
    """Simulate the step of several replicas, which end together.

    All functions but ``reduced`` are given (replica, action).

    Args:
        programs: for each replica one program for each of its ranks
            (:mod:`~lightning_wlb.schedule.programs`); stage s is on rank s % ranks.
        duration: how long the action computes, in ns.
        transfer: how long the message that the action needs takes, in ns. Called only for actions
            whose message comes from another rank.
        changed_bytes: bytes that a forward allocates at its begin, or a backward frees at its end.
        constant_bytes: bytes that each rank always holds, the same for all replicas; empty: 0.
        begins: the earliest begin of an action. Called only for the first forward of each stage.
        reduced: when all gradients have arrived, given each replica's last backward on each stage.
        synchronisation_ns: how long the step goes on after ``reduced`` and after the last action.
        sharers: for each replica :attr:`.ReplicaPlan.sharers`, the replicas that begin the actions
            of each micro-batch together (DP-Merge); empty: none is shared.

    Returns:
        One simulation for each replica; ``compute_ns`` and ``total_ns`` are those of the step.

    Raises:
        ValueError: the programs deadlock, or need an action that no rank runs; the message names
            the action at which each rank stands still.
    """
    runs = [_Run(of_replica) for of_replica in programs]
    _run_to_the_end(runs, duration, transfer, begins, sharers)
    every = [run.spans() for run in runs]
    compute_ns = max((end for run in runs for end in run.ends.values()), default=0)
    synchronisation_ns += max(reduced(_last_backwards(every)) - compute_ns, 0)
    return [
        Simulation(
            spans,
            [[changed_bytes(replica, action) for action in program] for program in of_replica],
            constant_bytes or [0] * len(of_replica),
            compute_ns,
            synchronisation_ns,
        )
        for replica, (of_replica, spans) in enumerate(zip(programs, every, strict=True))
    ]


class _Run:
    """How far the simulation of a replica's ranks has come."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.last_stage = max((action.stage for action in programs[-1]), default=0)
        # The begins of each rank's actions that have run, and the ends of all of them.
        self.begins: list[list[int]] = [[] for _ in programs]
        self.ends: dict[_Key, int] = {}
        self.waiting: dict[_Key, int] = {}  # by action, the rank that waits for its end
        self.started: set[int] = set()  # stages that have run a forward

    def spans(self) -> list[list[Span]]:
        """The actions of each rank with begin and end."""
        return [
            [Span(action, begin, self.ends[action]) for action, begin in zip(*each, strict=True)]
            for each in zip(self.programs, self.begins, strict=True)
        ]


def _run_to_the_end(
    runs: Sequence[_Run],
    duration: _Function,
    transfer: _Function,
    begins: _Function,
    sharers: Sequence[Sequence[tuple[int, ...]]],
) -> None:
    """Let every rank run as far as it can, again and again, until all have ended."""
    # By shared action, when each replica that has reached it could begin it.
    arrivals: dict[tuple[tuple[int, ...], Action], dict[int, int]] = {}
    ready = [(replica, rank) for replica, run in enumerate(runs) for rank in range(len(run.begins))]
    while ready:
        replica, rank = ready.pop()
        run = runs[replica]
        program, begun, ends = run.programs[rank], run.begins[rank], run.ends
        ranks, last_stage = len(run.begins), run.last_stage
        now = ends[program[len(begun) - 1]] if begun else 0
        for at in range(len(begun), len(program)):
            action = program[at]
            stage, kind, micro_batch = action
            needed: _Key = (stage + 1, kind, micro_batch)
            if kind == FORWARD:
                needed = (stage - 1, kind, micro_batch)
            elif stage == last_stage:
                needed = (stage, FORWARD, micro_batch)
            if needed[0] >= 0:
                arrival = ends.get(needed)
                if arrival is None:
                    run.waiting[needed] = rank
                    break
                if needed[0] % ranks != rank:
                    arrival += transfer(replica, action)
                if arrival > now:
                    now = arrival
            if kind == FORWARD and stage not in run.started:
                run.started.add(stage)
                now = max(now, begins(replica, action))
            if sharers and len(together := sharers[replica][micro_batch]) > 1:
                there = arrivals.setdefault((together, action), {})
                if replica not in there:
                    there[replica] = now
                    ready += [(other, rank) for other in there if other != replica]
                if len(there) < len(together):
                    break
                now = max(there.values())
            begun.append(now)
            now += duration(replica, action)
            ends[action] = now
            if action in run.waiting:
                ready.append((replica, run.waiting.pop(action)))
    _check_ended(runs)


def _check_ended(runs: Sequence[_Run]) -> None:
    """Name the ranks that stand still, and the action that each cannot run."""
    stuck = [
        f"rank {rank} of replica {replica} stands still at {program[len(begun)]}"
        for replica, run in enumerate(runs)
        for rank, (program, begun) in enumerate(zip(run.programs, run.begins, strict=True))
        if len(begun) < len(program)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {', '.join(stuck)}.")


def _last_backwards(every: Sequence[Sequence[Sequence[Span]]]) -> dict[int, list[LastBackward]]:
    """By stage, the last backward of each replica that has one."""
    last: dict[int, list[LastBackward]] = {}
    for spans in every:
        of_stages = {
            action.stage: (end, end - begin)
            for of_rank in spans
            for action, begin, end in of_rank
            if action.kind == BACKWARD
        }
        for stage, backward in of_stages.items():
            last.setdefault(stage, []).append(backward)
    return last
