"""Programs as text, and the simulation of a single pipeline: what tests write their cases with."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.simulator import Simulation, simulate_replicas


def format_program(program: Iterable[Action]) -> str:
    """A program in one line: ``0F0 0F1 0B0 0B1``."""
    return " ".join(str(action) for action in program)


def parse_program(text: str) -> list[Action]:
    """Read what :func:`format_program` wrote."""
    return [Action.parse(word) for word in text.split()]


def simulate(programs, duration, transfer=None, **given) -> Simulation:
    """``simulate_replicas`` of one pipeline, with functions of the action alone."""

    def of_replica(function):
        return function and (lambda replica, action: function(action))

    for name in ("opened_bytes", "freed_bytes"):
        given[name] = of_replica(given.get(name))
    return simulate_replicas([programs], of_replica(duration), of_replica(transfer), **given)[0]
