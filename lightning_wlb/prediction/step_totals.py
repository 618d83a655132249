"""The length of a step and the bytes of its fullest rank, without simulating it.

A predicted step (:mod:`~lightning_wlb.prediction.predictor`) has the begin, end and bytes of every
action. A planner that compares plans needs only its length and its peak. Here they come from arrays
over micro-batches and ranks: times from the recurrence of
:mod:`~lightning_wlb.schedule.fast_simulator`, bytes from the actions that have run before each
backward, which in 1F1B are known without times. A test holds that both equal the simulation's.

It knows the schedule 1F1B with one stage per rank (:func:`has_totals`); other steps are simulated.

Cost: about 0.1 ms and 20 µs per micro-batch for a replica, without the costs of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.prediction.micro_batch import MicroBatchCost
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step_memory import StepMemory, first_readers
from lightning_wlb.schedule.fast_simulator import Pipeline, members_of, step_ends
from lightning_wlb.schedule.packflow import backward_orders, planned_warm_up
from lightning_wlb.sharding.integer_ranges import Integers


class ActionOrder(NamedTuple):
    """The order in which a replica's actions run, which does not depend on their times."""

    order: Sequence[int]  #: micro-batches in the order of their backwards
    planned: Sequence[int]  #: forwards that the last rank runs before each backward
    readers: Mapping[int, int]  #: see :func:`.first_readers`


class StepTimes(NamedTuple):
    """When a step ends."""

    total_ns: int  #: length of the step, with the reduction of gradients and the optimizer
    ends_ns: tuple[int, ...]  #: when each replica has run all its actions


class Ends(NamedTuple):
    """When a replica's ranks have run their actions, and how long their last backwards take, ns."""

    ends: Sequence[int]
    last: Sequence[int]


def has_totals(predictor: Predictor) -> bool:
    """Whether :class:`StepTotals` knows the predictor's schedule."""
    return predictor.schedule == "1f1b" and predictor.latency.mesh.virtual_stages == 1


def orders_of(replicas: Sequence[ReplicaPlan]) -> list[ActionOrder]:
    """The order of each replica."""
    return [
        ActionOrder(order, planned_warm_up(needs), first_readers(replica))
        for replica, (order, needs) in zip(replicas, backward_orders(replicas), strict=True)
    ]


def rank_ends(replicas: Sequence[ReplicaTotals], orders: Sequence[ActionOrder]) -> list[Ends]:
    """When the ranks of each replica end; the replicas are as for :class:`StepTotals`."""
    pipelines = []
    for each, order in zip(replicas, orders, strict=True):
        traffic = each.predictor.traffic
        forward, backward = each.predictor.stage_durations(each.costs)
        pipeline = Pipeline(
            forward,
            backward,
            _message_times(each.predictor, each.costs),
            order.order,
            order.planned,
            members_of(each.replica),
            [traffic.begins(rank, times[0]) for rank, times in enumerate(forward)]
            if each.costs
            else (),
        )
        pipelines.append(pipeline)
    return [
        Ends(ends, [each[pipeline.order[-1]] for each in pipeline.backward if pipeline.order])
        for pipeline, ends in zip(pipelines, step_ends(pipelines), strict=True)
    ]


def _message_times(predictor: Predictor, costs: Sequence[MicroBatchCost]) -> list[list[int]]:
    """Time of a message to each rank from the rank before, [ranks][micro-batches]."""
    latency = predictor.latency
    links = latency.communication.pipeline
    of_links = {
        link: [latency.pipeline_ns(cost.rows, links.index(link)) for cost in costs]
        for link in set(links)
    }
    return [of_links[links[rank - 1]] for rank in range(latency.mesh.pipeline)]


def peaks_besides(
    memory: StepMemory, costs: Sequence[MicroBatchCost], order: ActionOrder
) -> Integers:
    """Most bytes that a replica's ranks hold besides those that they always hold, int64 [ranks]."""
    backwards = np.array(order.order, dtype=np.int64)
    ranks = len(memory.parts)
    run = _forwards_run(order, ranks)
    saved = memory.saved(costs)
    held = held_besides(memory, order, costs, [0] * ranks)
    held += _sums_before(saved)[run, np.arange(ranks)]
    held -= _sums_before(saved[backwards])[:-1]
    peaks: Integers = (held + memory.inside(costs)[backwards]).max(axis=0)
    return peaks


@dataclass(frozen=True, eq=False)
class ReplicaTotals:
    """A replica's part of the totals of its step; each value is computed on demand, once."""

    predictor: Predictor  #: a predictor that :func:`has_totals`
    replica: ReplicaPlan
    costs: Sequence[MicroBatchCost]
    #: the totals of the same plan with other costs, which has the same order
    alike: ReplicaTotals | None = None

    @cached_property
    def shares(self) -> bool:
        """Whether other replicas share a micro-batch, and so influence when this replica ends."""
        return any(len(each.replicas) > 1 for each in self.replica.forward)

    @cached_property
    def order(self) -> ActionOrder:
        """The order of the replica's actions; valid only if it shares no micro-batch."""
        return self.alike.order if self.alike else orders_of([self.replica])[0]

    @cached_property
    def ends(self) -> Ends:
        """The times at which the replica's ranks end."""
        return rank_ends([self], [self.order])[0]

    @cached_property
    def inputs(self) -> list[int]:
        """See :meth:`.StepMemory.inputs`; they do not depend on recomputation."""
        return self.alike.inputs if self.alike else self.predictor.memory.inputs(self.costs)

    @cached_property
    def peaks(self) -> Integers:
        """See :func:`peaks_besides`."""
        return peaks_besides(self.predictor.memory, self.costs, self.order)


class StepTotals:
    """The totals of a step from those of its replicas.

    Args:
        predictor: a predictor that :func:`has_totals`.
        replicas: a step's, or some that share only with each other; shared micro-batches first.

    Attributes:
        shares: whether any micro-batch is shared.
    """

    def __init__(self, predictor: Predictor, replicas: Sequence[ReplicaTotals]) -> None:
        self._predictor, self._replicas = predictor, replicas
        self.shares = any(each.shares for each in replicas)

    @cached_property
    def orders(self) -> list[ActionOrder]:
        """:func:`orders_of` the replicas."""
        if self.shares:
            return orders_of([each.replica for each in self._replicas])
        return [each.order for each in self._replicas]

    @cached_property
    def constant(self) -> list[int]:
        """Bytes that each rank always holds."""
        return self._predictor.memory.held_all_along([each.inputs for each in self._replicas])

    @property
    def times(self) -> StepTimes:
        """The times at which the step and each of its replicas end."""
        if self.shares:
            every = rank_ends(self._replicas, self.orders)
        else:
            every = [each.ends for each in self._replicas]
        traffic = self._predictor.traffic
        last: dict[int, list[tuple[int, int]]] = {}
        for of_replica in every:
            for rank, of_rank in enumerate(zip(*of_replica, strict=False)):
                last.setdefault(rank, []).append(of_rank)
        ends = tuple(max(each.ends) for each in every)
        end = max(max(ends, default=0), traffic.ends(last))
        return StepTimes(end + traffic.optimise, ends)

    @cached_property
    def peak(self) -> int:
        """Most bytes that a rank holds."""
        constant, memory = np.array(self.constant), self._predictor.memory
        peaks = [
            peaks_besides(memory, each.costs, order) if self.shares else each.peaks
            for each, order in zip(self._replicas, self.orders, strict=True)
            if each.costs
        ]
        return max((int((constant + each).max()) for each in peaks), default=0)


def held_besides(
    memory: StepMemory, order: ActionOrder, costs: Sequence[MicroBatchCost], constant: Sequence[int]
) -> Integers:
    """Bytes that each rank holds during each backward, besides what forwards have saved.

    Args:
        costs: their modes of recomputation are ignored.
        constant: bytes that each rank always holds.

    Returns:
        int64 [backwards, ranks].
    """
    ranks, count = len(constant), len(costs)
    backwards = np.array(order.order, dtype=np.int64)
    held = np.tile(np.array(constant, dtype=np.int64), (count, 1))
    run = _forwards_run(order, ranks)
    # Rank p holds a gradient that it sent until a forward arrives that rank p - 1 ran after it.
    sent = _sums_before(memory.boundaries(costs)[backwards])
    for rank in range(1, ranks):
        received = np.searchsorted(run[:, rank - 1], run[:, rank] - 1, side="right")
        held[:, rank] += sent[:-1] - sent[received]
    if order.readers:
        # Held from the end of the reader's backward to the end of the owner's.
        size = memory.key_gradients(costs)
        place = np.empty_like(backwards)
        place[backwards] = np.arange(count)
        made = np.zeros((count + 2, ranks), np.int64)
        for owner, reader in order.readers.items():
            made[reader + 1] += size[owner]
            made[place[owner] + 1] -= size[owner]
        held += np.cumsum(made, axis=0)[:count]
    return held


def backwards_before(order: ActionOrder, ranks: int) -> tuple[Integers, Integers]:
    """Backwards that each rank has run before each forward, and before each backward.

    Both are int64 [ranks, micro-batches].
    """
    run, numbers = _forwards_run(order, ranks), np.arange(len(order.order))
    first = np.array([np.searchsorted(of_rank, numbers, side="right") for of_rank in run.T])
    last = np.empty_like(first)
    last[:, order.order] = numbers
    return first, last


def _forwards_run(order: ActionOrder, ranks: int) -> Integers:
    """Forwards that each rank has run before each backward, int64 [backwards, ranks]."""
    more = np.arange(ranks - 1, -1, -1)
    planned = np.array(order.planned, dtype=np.int64)[:, None]
    run: Integers = np.minimum(len(order.order), planned + more)
    return run


def _sums_before(values: Integers) -> Integers:
    """Sums of the first 0, 1, ... all rows."""
    return np.concatenate((np.zeros_like(values[:1]), np.cumsum(values, axis=0)))
