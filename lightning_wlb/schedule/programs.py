"""The pipeline schedules by name, the programs of a step, and where replicas meet in them.

Every schedule is a case of PackFlow (:mod:`~lightning_wlb.schedule.packflow`); one line of
:data:`SCHEDULES` registers another, and the tests hold every one of them to
:func:`~lightning_wlb.schedule.proof.check_schedule`.

Cost: linear in actions; for shared micro-batches in those of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.packflow import backward_order, backward_orders, packflow


class Schedule(NamedTuple):
    """A way to order the actions of a pipeline.

    Attributes:
        program: makes the program of one rank; arguments and result of
            :func:`~lightning_wlb.schedule.packflow.packflow`.
        slices: whether it runs slices of pieces, whose backward has an order of its own.
        virtual_stages: whether a rank may have several stages.
    """

    program: Callable[[int, int, Sequence[int], Sequence[int], int], list[Action]]
    slices: bool
    virtual_stages: bool


def gpipe(
    rank: int, ranks: int, backward: Sequence[int], needs: Sequence[int], virtual_stages: int
) -> list[Action]:
    """Every forward before the first backward; the arguments are those of ``packflow``."""
    return packflow(rank, ranks, backward, [len(needs)] * len(needs), virtual_stages)


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(packflow, slices=True, virtual_stages=False),
    "gpipe": Schedule(gpipe, slices=False, virtual_stages=False),
    "interleaved": Schedule(packflow, slices=True, virtual_stages=True),
}


def make_program(
    schedule: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> list[Action]:
    """What one rank does in a step of whole pieces.

    Args:
        schedule: a name in :data:`SCHEDULES`.
        rank: 0-based rank of the pipeline.
        ranks: number of ranks of the pipeline, P, at least 1.
        micro_batches: how many pass through the pipeline, M, at least 0.
        virtual_stages: V, at least 1; rank r of P owns stages r, r + P, r + 2P, ...

    Raises:
        ValueError: if the schedule is unknown or cannot run so many stages per rank.
    """
    check_stages(schedule, virtual_stages)
    needs = range(1, micro_batches + 1)
    return SCHEDULES[schedule].program(rank, ranks, range(micro_batches), needs, virtual_stages)


def make_programs(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> list[list[Action]]:
    """The programs of all ranks of a pipeline, see :func:`make_program`."""
    return [
        make_program(schedule, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)
    ]


def check_stages(schedule: str, virtual_stages: int) -> None:
    """Whether a schedule can run so many stages per rank.

    Raises:
        ValueError: if it cannot, or is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if virtual_stages < 1:
        raise ValueError(f"virtual_stages={virtual_stages}: a rank runs at least one stage.")
    if virtual_stages > 1 and not SCHEDULES[schedule].virtual_stages:
        raise ValueError(
            f"schedule {schedule!r} runs one stage per rank, not {virtual_stages}: use"
            " 'interleaved' for several."
        )


def program_of(
    schedule: str,
    rank: int,
    ranks: int,
    virtual_stages: int,
    replicas: Sequence[ReplicaPlan],
    number: int,
) -> list[Action]:
    """What one rank of a replica does in a step.

    Replicas that share micro-batches (DP-Merge) plan their warm-up together, or they would meet in
    different orders.

    Args:
        schedule: a name in :data:`SCHEDULES`.
        rank: place in the pipeline.
        ranks: of the pipeline, P.
        virtual_stages: V.
        replicas: plans of all replicas, as they are executed (``prediction.executed``).
        number: of the rank's replica.

    Raises:
        ValueError: for sliced pieces with a schedule that does not run them, or shared
            micro-batches with virtual stages; and as :func:`make_program`.
    """
    check_stages(schedule, virtual_stages)
    replica = replicas[number]
    merged = any(len(group.replicas) > 1 for group in replica.forward)
    if merged and virtual_stages > 1:
        raise ValueError(
            f"replica {number} shares micro-batches with others, which needs one stage per"
            f" pipeline rank, not {virtual_stages}: replicas with unlike numbers of micro-batches"
            " would meet in different orders. Use schedule='1f1b', or a packing that does not"
            " merge replicas."
        )
    if not SCHEDULES[schedule].slices and any(
        part.context for each in (replicas if merged else [replica]) for part in each.slices
    ):
        raise ValueError(
            f"the plan slices pieces over micro-batches, which schedule={schedule!r} does not run:"
            " their backward has another order. Use schedule='1f1b' or 'interleaved', or a packing"
            " that keeps pieces whole."
        )
    order = backward_orders(replicas)[number] if merged else backward_order(replica)
    return SCHEDULES[schedule].program(rank, ranks, *order, virtual_stages)


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
