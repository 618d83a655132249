"""The pipeline schedules by name, and the programs of a step.

Every schedule is a case of PackFlow (:mod:`~lightning_wlb.schedule.packflow`); one line of
:data:`SCHEDULES` registers another, and ``tests/schedule/proof.py`` proves that none deadlocks.

Cost: linear in a rank's actions; with shared micro-batches, in the actions of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_wlb.argument_checks import choice, whole
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.packflow import backward_order, backward_orders, packflow


class Schedule(NamedTuple):
    """A way to order the actions of a pipeline."""

    #: makes the program of one rank, like :func:`~lightning_wlb.schedule.packflow.packflow`
    program: Callable[[int, int, Sequence[int], Sequence[int], int], list[Action]]
    virtual_stages: bool  #: whether a rank may have several stages


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(packflow, virtual_stages=False),
    "interleaved": Schedule(packflow, virtual_stages=True),
}
"""Schedules by name."""


def check_stages(schedule: str, virtual_stages: int) -> None:
    """Raise ValueError for an unknown schedule, or one that cannot run so many stages per rank."""
    of_schedule = SCHEDULES[choice("schedule", schedule, SCHEDULES)]
    if whole("virtual_stages", virtual_stages, 1) > 1 and not of_schedule.virtual_stages:
        raise ValueError(
            f"schedule {schedule!r} runs one stage a rank, not {virtual_stages}: use 'interleaved'."
        )


def program_of(
    schedule: str,
    rank: int,
    ranks: int,
    virtual_stages: int,
    replicas: Sequence[ReplicaPlan],
    number: int,
    orders: Sequence[tuple[list[int], list[int]]] = (),
) -> list[Action]:
    """The program of one rank of a replica in a step.

    Replicas that share micro-batches (DP-Merge) plan their warm-up together, to meet in one order.

    Args:
        number: which replica the rank belongs to.
        orders: :func:`.backward_orders` of the replicas, if they are known.

    Raises:
        ValueError: shared micro-batches with virtual stages, or as :func:`check_stages`.
    """
    check_stages(schedule, virtual_stages)
    replica = replicas[number]
    merged = any(len(each.replicas) > 1 for each in replica.forward)
    if merged and virtual_stages > 1:
        raise ValueError(
            f"replica {number} shares micro-batches with others, which needs one stage per pipeline"
            f" rank, not {virtual_stages}: replicas with unlike numbers of micro-batches would meet"
            " in different orders. Use schedule='1f1b', or a packing that does not merge replicas."
        )
    order = (orders or backward_orders(replicas))[number] if merged else backward_order(replica)
    return SCHEDULES[schedule].program(rank, ranks, *order, virtual_stages)
