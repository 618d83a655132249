"""When the steps of some replicas end, without a graph of their actions.

With one stage per rank, PackFlow lets rank p run min(M, n_j + P - 1 - p) forwards before backward j
(:mod:`~lightning_wlb.schedule.packflow`). Once each rank in turn has run these, backward j has all
that it needs, so one pass over backwards and ranks gives every time. Replicas that share
micro-batches (DP-Merge) advance through these together: they come first on each replica, with a
warm-up planned together (:func:`~lightning_wlb.schedule.packflow.backward_orders`).

The times equal those of :mod:`~lightning_wlb.schedule.simulator` exactly (a test holds this), in a
tenth of the time. Use the simulator for several stages per rank, for programs other than
PackFlow's, or if more than the end is needed.

Cost: about 0.2 µs for an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_wlb.plan import ReplicaPlan

Durations = Sequence[Sequence[int]]
"""[ranks][micro-batches in forward order]."""


class Pipeline(NamedTuple):
    """The step of one replica; all times in one unit, ns where they are predicted."""

    forward: Durations
    backward: Durations
    #: how long a message between a rank and the rank before takes, with activations or their
    #: gradients; unused for rank 0
    transfer: Durations
    order: Sequence[int]  #: micro-batches in the order of their backwards
    #: forwards that the last rank runs before each backward, see
    #: :func:`~lightning_wlb.schedule.packflow.planned_warm_up`
    planned: Sequence[int]
    #: for each shared micro-batch, the replicas that share it; shared micro-batches come first
    members: Sequence[tuple[int, ...]] = ()
    begins: Sequence[int] = ()  #: the time before which each rank runs nothing; empty: 0 for all


def members_of(replica: ReplicaPlan) -> list[tuple[int, ...]]:
    """The replicas that share each of a replica's shared micro-batches, which come first."""
    return [members for members in replica.sharers if len(members) > 1]


def step_ends(pipelines: Sequence[Pipeline]) -> list[list[int]]:
    """When each rank of each replica has ended its last action: [replicas][ranks].

    A rank without actions ends when it begins. ``pipelines`` are all replicas of a step, or some
    that share micro-batches with each other only.
    """
    runs = [_PipelineRun(pipeline) for pipeline in pipelines]
    groups = dict.fromkeys(
        (index, members) for pipeline in pipelines for index, members in enumerate(pipeline.members)
    )
    shared = sorted(groups)
    for place in range(max((len(pipeline.members) for pipeline in pipelines), default=0)):
        _together(runs, shared, place)
    return [run.finish(len(run.pipeline.members)) for run in runs]


class _PipelineRun:
    """How far the simulation of one replica has come."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.ranks = len(pipeline.forward)
        self.count = len(pipeline.order)
        self.clock = list(pipeline.begins) or [0] * self.ranks
        self.arrived = [0] * self.count  # when each forward ended on the last rank that ran it
        self.done = [0] * self.ranks  # forwards that each rank has run
        self.ready = 0  # when the current backward ended on the last rank that ran it

    def stop(self, place: int, rank: int) -> int:
        """How many forwards the rank runs before the backward at ``place``."""
        return min(self.count, self.pipeline.planned[place] + self.ranks - 1 - rank)

    def finish(self, place: int) -> list[int]:
        """Run everything from the backward at ``place`` on; returns when each rank has ended."""
        forward, backward, transfer, order, planned = self.pipeline[:5]
        count, ranks = self.count, self.ranks
        clock, arrived, done = self.clock, self.arrived, self.done
        last = ranks - 1
        for at in range(place, count):
            need = planned[at]
            for rank in range(ranks):
                stop = need + last - rank
                if stop > count:
                    stop = count
                first = done[rank]
                if first < stop:
                    now, each, way = clock[rank], forward[rank], transfer[rank]
                    for index in range(first, stop):
                        if rank and arrived[index] + way[index] > now:
                            now = arrived[index] + way[index]
                        now += each[index]
                        arrived[index] = now
                    done[rank] = stop
                    clock[rank] = now
            index = order[at]
            ready = clock[last] + backward[last][index]
            clock[last] = ready
            for rank in range(last - 1, -1, -1):
                now = clock[rank]
                ready += transfer[rank + 1][index]
                if ready < now:
                    ready = now
                ready += backward[rank][index]
                clock[rank] = ready
        return clock

    def forward_begin(self, rank: int, index: int) -> int:
        """When the rank can begin its next forward, which is this one."""
        arrival = self.arrived[index] + self.pipeline.transfer[rank][index] if rank else 0
        return max(self.clock[rank], arrival)

    def forward_at(self, rank: int, index: int, begin: int) -> None:
        """Run a forward from ``begin`` on."""
        self.clock[rank] = self.arrived[index] = begin + self.pipeline.forward[rank][index]
        self.done[rank] = index + 1

    def backward_begin(self, rank: int, index: int) -> int:
        """When the rank can begin this backward, which all ranks after it have run."""
        if rank == self.ranks - 1:
            return self.clock[rank]
        return max(self.clock[rank], self.ready + self.pipeline.transfer[rank + 1][index])

    def backward_at(self, rank: int, index: int, begin: int) -> None:
        """Run a backward from ``begin`` on."""
        self.ready = self.clock[rank] = begin + self.pipeline.backward[rank][index]


def _together(
    runs: Sequence[_PipelineRun], shared: Sequence[tuple[int, tuple[int, ...]]], place: int
) -> None:
    """Run the shared backward at ``place`` and the forwards before it on its replicas."""
    active = [run for run in runs if len(run.pipeline.members) > place]
    for rank in range(active[0].ranks):
        for index, members in shared:
            run = runs[members[0]]
            if place >= len(run.pipeline.members):
                continue
            if run.done[rank] <= index < run.stop(place, rank):
                begin = max(runs[each].forward_begin(rank, index) for each in members)
                for each in members:
                    runs[each].forward_at(rank, index, begin)
        for run in active:
            for index in range(run.done[rank], run.stop(place, rank)):
                run.forward_at(rank, index, run.forward_begin(rank, index))
    passing = dict.fromkeys(
        (run.pipeline.order[place], run.pipeline.members[run.pipeline.order[place]])
        for run in active
    )
    for rank in range(active[0].ranks - 1, -1, -1):
        for index, members in passing:
            begin = max(runs[each].backward_begin(rank, index) for each in members)
            for each in members:
                runs[each].backward_at(rank, index, begin)
