"""The length of a step and the bytes of its fullest rank, without simulating it.

A predicted step (:mod:`~lightning_wlb.prediction.predictor`) has the begin, end and bytes of every
action. A planner that compares plans needs only its length and its peak. Here they come from arrays
over micro-batches and ranks: times from the recurrence of
:mod:`~lightning_wlb.schedule.fast_simulator`, bytes from what has run before each backward, which
in 1F1B is known without times. Both equal those of the simulation, which a test holds.

It knows the schedule 1F1B with one stage per rank (:func:`has_totals`); other steps are simulated.

Cost: about 0.1 ms and 20 µs per micro-batch for a replica, the costs of micro-batches not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The order in which a replica's actions run, whatever they take.

    Attributes:
        order: micro-batches in the order of their backwards.
        planned: forwards that the last rank runs before each backward.
        readers: see :func:`.first_readers`.
    """

    order: Sequence[int]
    planned: Sequence[int]
    readers: Mapping[int, int]


class StepTimes(NamedTuple):
    """When a step ends.

    Attributes:
        total_ns: its length, with the reduction of gradients and the optimizer.
        ends_ns: when each replica has run all its actions.
    """

    total_ns: int
    ends_ns: tuple[int, ...]


def has_totals(predictor: Predictor) -> bool:
    """Whether :func:`step_times` and :func:`peak_bytes` know the predictor's schedule."""
    return predictor.schedule == "1f1b" and predictor.latency.mesh.virtual_stages == 1


def orders_of(replicas: Sequence[ReplicaPlan]) -> list[ActionOrder]:
    """The order of each replica."""
    return [
        ActionOrder(order, planned_warm_up(needs), first_readers(replica))
        for replica, (order, needs) in zip(replicas, backward_orders(replicas), strict=True)
    ]


def step_times(
    predictor: Predictor,
    replicas: Sequence[ReplicaPlan],
    costs: Sequence[Sequence[MicroBatchCost]],
    orders: Sequence[ActionOrder],
) -> StepTimes:
    """When the step of replicas ends that share micro-batches with each other only.

    Args:
        predictor: one that :func:`has_totals`.
        replicas: shared micro-batches come first on all that share them.
        costs: [replicas][micro-batches].
        orders: :func:`orders_of` the replicas.
    """
    traffic = predictor.traffic
    pipelines = []
    for replica, of_replica, order in zip(replicas, costs, orders, strict=True):
        forward, backward = predictor.stage_durations(of_replica)
        pipeline = Pipeline(
            forward,
            backward,
            _message_times(predictor, of_replica),
            order.order,
            order.planned,
            members_of(replica),
            [traffic.begins(rank, each[0]) for rank, each in enumerate(forward)]
            if of_replica
            else (),
        )
        pipelines.append(pipeline)
    ends = step_ends(pipelines)
    last: dict[int, list[tuple[int, int]]] = {}
    for pipeline, of_ranks in zip(pipelines, ends, strict=True):
        if pipeline.order:
            for rank, end in enumerate(of_ranks):
                took = pipeline.backward[rank][pipeline.order[-1]]
                last.setdefault(rank, []).append((end, took))
    of_replicas = tuple(map(max, ends))
    end = max(max(of_replicas, default=0), traffic.ends(last))
    return StepTimes(end + traffic.optimise, of_replicas)


def _message_times(predictor: Predictor, costs: Sequence[MicroBatchCost]) -> list[list[int]]:
    """How long a boundary tensor takes to each rank from the one before, [ranks][micro-batches]."""
    latency = predictor.latency
    links = latency.communication.pipeline
    of_links = {
        link: [latency.pipeline_ns(cost.rows, links.index(link)) for cost in costs]
        for link in set(links)
    }
    return [of_links[links[rank - 1]] for rank in range(latency.mesh.pipeline)]


def peak_bytes(
    predictor: Predictor,
    costs: Sequence[Sequence[MicroBatchCost]],
    orders: Sequence[ActionOrder],
) -> int:
    """Most bytes that a rank holds, state included; arguments are those of :func:`step_times`."""
    memory = predictor.memory
    constant = memory.constant(costs)
    most = 0
    for of_replica, order in zip(costs, orders, strict=True):
        if of_replica:
            backwards = np.array(order.order, dtype=np.int64)
            run = _forwards_run(order, len(constant))
            saved = memory.saved(of_replica)
            held = held_besides(memory, order, of_replica, constant)
            held += _sums_before(saved)[run, np.arange(len(constant))]
            held -= _sums_before(saved[backwards])[:-1]
            most = max(most, int((held + memory.inside(of_replica)[backwards]).max()))
    return most


def held_besides(
    memory: StepMemory,
    order: ActionOrder,
    costs: Sequence[MicroBatchCost],
    constant: Sequence[int],
) -> Integers:
    """What each rank holds while it runs each backward, besides what forwards have saved.

    Args:
        memory: bytes of the model on the mesh.
        order: the order of the replica's actions.
        costs: costs of its micro-batches; what they recompute does not matter.
        constant: bytes that each rank holds all along.

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
        # Held from the end of the reader's backward to that of the owner's.
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

    Returns:
        Both int64 [ranks, micro-batches].
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
