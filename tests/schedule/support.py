"""Programs as text, and the simulation of a single pipeline: what tests write their cases with."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.packflow import packflow
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.schedule.simulator import Simulation, simulate_replicas


def format_program(program: Iterable[Action]) -> str:
    """A program in one line: ``0F0 0F1 0B0 0B1``."""
    return " ".join(str(action) for action in program)


def parse_program(text: str) -> list[Action]:
    """Read what :func:`format_program` wrote."""
    words = re.findall(r"(\d+)([FB])(\d+)", text)
    return [Action(int(stage), kind, int(micro_batch)) for stage, kind, micro_batch in words]


def programs_of(ranks: int, orders: Iterable[tuple[list[int], list[int]]]) -> list[list]:
    """[replicas][ranks], the programs of PackFlow for the order of each replica."""
    return [[packflow(rank, ranks, *order) for rank in range(ranks)] for order in orders]


def meetings_of(
    sharers: Sequence[Sequence[tuple[int, ...]]],
) -> Callable[[int, Action], Hashable]:
    """A function of (replica, action) that names the actions which replicas run together.

    The name is the same on all replicas that run the action together, None for an action of one
    replica. ``sharers`` has those of each replica's micro-batches (``ReplicaPlan.sharers``).
    """

    def name(replica: int, action: Action) -> Hashable:
        members = sharers[replica][action.micro_batch]
        return None if len(members) == 1 else (members, action)

    return name


def sharers_of(replicas: Sequence[ReplicaPlan]) -> list[list[tuple[int, ...]]]:
    """The sharers of all replicas of a step."""
    return [replica.sharers for replica in replicas]


def simulate(programs, duration, transfer=None, *, changed_bytes=None, **given) -> Simulation:
    """``simulate_replicas`` of one pipeline, with functions of the action alone."""

    def of_replica(function):
        return lambda replica, action: function(action) if function else 0

    functions = of_replica(duration), of_replica(transfer)
    given["changed_bytes"] = of_replica(changed_bytes)
    return simulate_replicas([programs], *functions, **given)[0]


def make_programs(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> list[list[Action]]:
    """What each rank of a pipeline does in a step of so many whole pieces, by the schedule."""
    program, needs = SCHEDULES[schedule].program, range(1, micro_batches + 1)
    return [
        program(rank, ranks, range(micro_batches), needs, virtual_stages) for rank in range(ranks)
    ]
