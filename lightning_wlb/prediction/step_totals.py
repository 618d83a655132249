"""The length of a step and the bytes of its fullest rank, and nothing else: what a judge asks.

A predicted step (:mod:`~lightning_wlb.prediction.predictor`) has the begin, end and bytes of every
action. Here the same two totals come from arrays over micro-batches and ranks: times by the
recurrence (:mod:`~lightning_wlb.schedule.fast_simulator`), bytes from what has run before each
backward, which in 1F1B is known without times. Both are exactly those of the simulation, which a
test holds. Only for the schedule 1F1B with one stage per rank.

Cost: about 0.1 ms and 20 µs per micro-batch for a replica, the costs of micro-batches not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import MicroBatchCost
from lightning_wlb.prediction.step_memory import StepMemory, first_readers
from lightning_wlb.schedule.fast_simulator import Pipeline, members_of, step_ends
from lightning_wlb.schedule.packflow import backward_orders, planned_warm_up
from lightning_wlb.sharding.integer_ranges import Integers


class Order(NamedTuple):
    """In which order a replica's actions run, whatever they take.

    Attributes:
        order: as of :class:`.recurrence.Pipeline`.
        planned: likewise.
        readers: as :func:`.first_readers` has them.
    """

    order: Sequence[int]
    planned: Sequence[int]
    readers: Mapping[int, int]


class StepTotals(NamedTuple):
    """Of a predicted step.

    Attributes:
        total_ns: its length.
        peak_bytes: most of a rank, state included.
        ends_ns: when each replica has run all its actions.
    """

    total_ns: int
    peak_bytes: int
    ends_ns: tuple[int, ...]


def has_totals(predictor: Predictor) -> bool:
    """Whether :func:`step_totals` knows the predictor's schedule."""
    return predictor.schedule == "1f1b" and predictor.latency.mesh.virtual_stages == 1


def step_totals(
    predictor: Predictor,
    replicas: Sequence[ReplicaPlan],
    costs: Sequence[Sequence[MicroBatchCost]],
    orders: Sequence[Order] | None = None,
    peak: int | None = None,
) -> StepTotals:
    """The totals of the step of replicas that share micro-batches with each other only.

    Args:
        predictor: see :func:`has_totals`.
        replicas: as they are executed; shared micro-batches come first on all that share them.
        costs: of each replica's micro-batches.
        orders: of each replica, where they are known.
        peak: what :func:`peak_bytes` says of them, likewise.
    """
    orders = orders or orders_of(replicas)
    traffic = predictor.traffic
    pipelines = []
    for replica, of_replica, order in zip(replicas, costs, orders, strict=True):
        forward, backward = predictor.stage_durations(of_replica)
        pipeline = Pipeline(
            forward,
            backward,
            _travel(predictor, of_replica),
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
    if peak is None:
        peak = peak_bytes(predictor, costs, orders)
    return StepTotals(end + traffic.optimise, peak, of_replicas)


def orders_of(replicas: Sequence[ReplicaPlan]) -> list[Order]:
    """Of each replica as it is executed."""
    return [
        Order(order, planned_warm_up(needs), first_readers(replica))
        for replica, (order, needs) in zip(replicas, backward_orders(replicas), strict=True)
    ]


def peak_bytes(
    predictor: Predictor,
    costs: Sequence[Sequence[MicroBatchCost]],
    orders: Sequence[Order],
    ample: int = 0,
) -> int:
    """That of :func:`step_totals` alone.

    Args:
        predictor: see :func:`has_totals`.
        costs: of each replica's micro-batches.
        orders: of each replica.
        ample: where no more than so much can be held, what can be is enough of an answer: it is
            known sooner.
    """
    memory = predictor.memory
    constant = memory.constant(costs)
    most = 0
    for of_replica, order in zip(costs, orders, strict=True):
        if of_replica:
            bound = _bound(memory, of_replica, constant) if ample else 0
            exact = not ample or bound > ample
            most = max(most, _peak(memory, order, of_replica, constant) if exact else bound)
    return most


def _bound(memory: StepMemory, costs: Sequence[MicroBatchCost], constant: Sequence[int]) -> int:
    """Bytes that no rank exceeds: as if all micro-batches were open at once."""
    held = memory.saved_by_all(costs) + memory.boundaries(costs)[:, None]
    if any(cost.kept_rows for cost in costs):
        held += memory.key_gradients_of_all(costs)
    return int((held.sum(axis=0) + constant + _most_inside(memory, costs)).max())


def _travel(predictor: Predictor, costs: Sequence[MicroBatchCost]) -> list[list[int]]:
    """``travel`` of :class:`.recurrence.Pipeline`."""
    latency = predictor.latency
    links = latency.communication.pipeline
    of_links = {
        link: [latency.pipeline_ns(cost.rows, links.index(link)) for cost in costs]
        for link in set(links)
    }
    return [of_links[links[rank - 1]] for rank in range(latency.mesh.pipeline)]


def _peak(
    memory: StepMemory, order: Order, costs: Sequence[MicroBatchCost], constant: Sequence[int]
) -> int:
    """Most bytes on a rank in a backward; arrays are [backwards, ranks]."""
    backwards = np.array(order[0], dtype=np.int64)
    run = _forwards_run(order, len(constant))
    saved = memory.saved_by_all(costs)
    held = held_besides(memory, order, costs, constant)
    held += _before(saved)[run, np.arange(len(constant))] - _before(saved[backwards])[:-1]
    return _fullest(memory, held, [costs[each] for each in order[0]])


def _forwards_run(order: Order, ranks: int) -> Integers:
    """Forwards that each rank has run before each backward, int64 [backwards, ranks]."""
    more = np.arange(ranks - 1, -1, -1)
    run: Integers = np.minimum(len(order[0]), np.array(order[1], dtype=np.int64)[:, None] + more)
    return run


def backwards_before(order: Order, ranks: int) -> tuple[Integers, Integers]:
    """Backwards that each rank has run before each forward, and before each backward.

    Args:
        order: of the replica's backwards, as :func:`orders_of` has it.
        ranks: of its pipeline.

    Returns:
        Both int64 [ranks, micro-batches].
    """
    run, numbers = _forwards_run(order, ranks), np.arange(len(order[0]))
    first = np.array([np.searchsorted(of_rank, numbers, side="right") for of_rank in run.T])
    last = np.empty_like(first)
    last[:, order[0]] = numbers
    return first, last


def held_besides(
    memory: StepMemory,
    order: Order,
    costs: Sequence[MicroBatchCost],
    constant: Sequence[int],
) -> Integers:
    """What each rank holds while it runs each backward, besides what forwards have saved.

    Args:
        memory: of the model on the mesh.
        order: of the replica's backwards, as :func:`orders_of` has it.
        costs: of its micro-batches; what they recompute does not matter.
        constant: what each rank holds all along.

    Returns:
        int64 [backwards, ranks].
    """
    ranks, count = len(constant), len(costs)
    backwards = np.array(order[0], dtype=np.int64)
    held = np.tile(np.array(constant, dtype=np.int64), (count, 1))
    run = _forwards_run(order, ranks)
    # Rank p holds a gradient that it sent until p - 1 has run it and sent the next forward on.
    sent = _before(memory.boundaries(costs)[backwards])
    for rank in range(1, ranks):
        received = np.searchsorted(run[:, rank - 1], run[:, rank] - 1, side="right")
        held[:, rank] += sent[:-1] - sent[received]
    if order.readers:
        # Held from the end of the reader's backward to that of the owner's.
        size = memory.key_gradients_of_all(costs)
        place = np.empty_like(backwards)
        place[backwards] = np.arange(count)
        made = np.zeros((count + 2, ranks), np.int64)
        for owner, reader in order.readers.items():
            made[reader + 1] += size[owner]
            made[place[owner] + 1] -= size[owner]
        held += np.cumsum(made, axis=0)[:count]
    return held


def _before(values: Integers) -> Integers:
    """Sums of the first 0, 1, ... all rows."""
    return np.concatenate((np.zeros_like(values[:1]), np.cumsum(values, axis=0)))


def _most_inside(memory: StepMemory, costs: Sequence[MicroBatchCost]) -> Integers:
    """Bytes that live only inside a pass, at most, int64 [ranks]."""
    largest = costs[0]._replace(
        rows=max(cost.rows for cost in costs),
        keys=max(cost.keys for cost in costs),
        segments=max(cost.segments for cost in costs),
    )
    modes = {cost.recompute for cost in costs}
    bounds = {
        parts: max(memory.inside(parts, largest, mode) for mode in modes)
        for parts in set(memory.parts)
    }
    return np.array([bounds[parts] for parts in memory.parts], dtype=np.int64)


def _fullest(memory: StepMemory, held: Integers, costs: Sequence[MicroBatchCost]) -> int:
    """Most of what a rank holds in a backward and of what lives only inside it."""
    above = held + _most_inside(memory, costs)
    most = 0
    for at in np.argsort(-above, axis=None, kind="stable").tolist():
        place, rank = divmod(at, held.shape[1])
        if above[place, rank] <= most:
            break
        inside = memory.inside(memory.parts[rank], costs[place])
        most = max(most, int(held[place, rank]) + inside)
    return most
