"""From a step's plan to the programs that run it, and where replicas meet in them.

A replica without slices runs the schedule that was asked for. Slices need PackFlow, which takes
its place where it is a 1F1B; so does a replica that shares micro-batches (DP-Merge) with others
that have slices, or they would meet in different orders.

Cost: linear in actions; for shared micro-batches in those of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.packflow import backward_order, backward_orders, packflow
from lightning_wlb.schedule.registry import make_program

SLICING_SCHEDULES = ("1f1b", "interleaved")


def program_of(
    schedule: str,
    rank: int,
    ranks: int,
    stages_per_rank: int,
    replicas: Sequence[ReplicaPlan],
    number: int,
) -> list[Action]:
    """What one rank of a replica does in a step.

    Args:
        schedule: a name in :data:`~lightning_wlb.schedule.registry.SCHEDULES`.
        rank: place in the pipeline.
        ranks: of the pipeline, P.
        stages_per_rank: V.
        replicas: plans of all replicas, as they are executed (``planning.units``).
        number: of the rank's replica.

    Raises:
        ValueError: for sliced pieces with a schedule that is no 1F1B, or shared micro-batches with
            virtual stages; and as
            :func:`~lightning_wlb.schedule.registry.make_program`.
    """
    replica = replicas[number]
    merged = any(len(group.replicas) > 1 for group in replica.forward)
    if merged and stages_per_rank > 1:
        raise ValueError(
            f"replica {number} shares micro-batches with others, which needs one stage per"
            f" pipeline rank, not {stages_per_rank}: replicas with unlike numbers of micro-batches"
            " would meet in different orders. Use schedule='1f1b', or a packing that does not"
            " merge replicas."
        )
    sliced = replicas if merged else [replica]
    if not any(part.context for each in sliced for part in each.slices):
        return make_program(schedule, rank, ranks, len(replica.forward), stages_per_rank)
    if schedule not in SLICING_SCHEDULES:
        raise ValueError(
            f"the plan slices pieces over micro-batches, which schedule={schedule!r} does not run:"
            " their backward has another order. Use schedule='1f1b' or 'interleaved', or a packing"
            " that keeps pieces whole."
        )
    order = backward_orders(replicas)[number] if merged else backward_order(replica)
    return packflow(rank, ranks, *order, stages_per_rank)


def meetings_of(replicas: Sequence[ReplicaPlan]) -> Callable[[int, Action], Hashable] | None:
    """What an action is called on all replicas that run it together, and None for their own.

    Shared micro-batches have the same place on all their replicas, since they come first. None in
    place of a function: no micro-batch is shared.
    """
    if all(len(group.replicas) == 1 for each in replicas for group in each.forward):
        return None

    def name(replica: int, action: Action) -> Hashable:
        members = replicas[replica].forward[action.micro_batch].replicas
        return None if len(members) == 1 else (members, action)

    return name
