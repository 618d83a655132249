"""Runs whose steps take given strategies in turn, whatever is simulated to be fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.planning.dealing import arrange
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.plan import Scheme, Schemes
from lightning_wlb.planning.step_chooser import PlannedStep

ON_THREE: tuple[Schemes, ...] = (
    (Scheme(0, (2,), context=2), Scheme(2, (2,))),
    (Scheme(0, (1, 1)), Scheme(2, (2,))),
)
"""Of three ranks and two layers: a context-parallel pair, or two stages, beside a rank alone."""

PROFILE = replace(Profile.load("cpu"), devices_per_node=3)


def take_in_turn(turns: Sequence[Schemes]) -> list[int]:
    """Let this process's steps take these strategies in turn; empty ones stay on the mesh.

    Which one goes by the number of the step, so that a run that is resumed makes the same choices.

    Returns:
        What the steps that leave the mesh are simulated to take, in ns, as they are planned.
    """
    times: list[int] = []

    def arranged(self: Pool, pieces, packer) -> list[PlannedStep]:
        strategy = turns[pieces[0].arrival % len(turns)]
        if not strategy:
            return []
        made = arrange(pieces, strategy, self.kinds[strategy], packer)
        times.append(made.time_ns)
        return [made._replace(excess=-1)]  # it is taken however long it takes

    Pool.arranged = arranged  # type: ignore[method-assign]
    return times
