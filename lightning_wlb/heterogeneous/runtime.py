"""Steps on pipelines of their own, which differ from the mesh's and from each other.

Parameters and optimizer state stay where the mesh has them. A step's plan says its strategy; every
rank then holds, for that step, the stage of its pipeline's scheme (:mod:`.of_strategy`): parameters
are pulled from where they rest, gradients pushed back (:mod:`.linked`, :mod:`.travel`). All else of
a step is the :class:`~lightning_wlb.training.executor.Executor`'s, to which :class:`Elsewhere` says
what it runs on.

Cost: process groups, and modules without values, for each strategy. For steps on the mesh's own
pipelines :class:`~lightning_wlb.training.parameter_buckets.Gathering` holds less, and copies less.
"""

from __future__ import annotations

from lightning_wlb.heterogeneous.layouts import Strategy
from lightning_wlb.heterogeneous.links import Links
from lightning_wlb.heterogeneous.parameters import Linked
from lightning_wlb.heterogeneous.pipelines import OfStrategy, Settings
from lightning_wlb.heterogeneous.transfer import Groups
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.plan import StepPlan
from lightning_wlb.training.executor import Surroundings


class Elsewhere:
    """What the steps of any strategy run on, of one rank: for ``Executor.elsewhere``.

    Args:
        model: this rank's share of the model at rest.
        links: to any strategy, of this rank.
        groups: for the exchanges of links (:func:`.travel_groups`).
        settings: of the run.
    """

    def __init__(self, model: Decoder, links: Links, groups: Groups, settings: Settings) -> None:
        self._links, self._groups, self._settings = links, groups, settings
        self._model = model
        self._made: dict[Strategy, tuple[OfStrategy, Linked]] = {}

    def __call__(self, plan: StepPlan) -> Surroundings:
        """What this plan's steps run on; collective over all ranks where its strategy is new, or
        where as many pipelines as never before share a micro-batch.

        Raises:
            ValueError: the strategy is the mesh's.
        """
        link = self._links.to(plan.strategy)
        if link is None:
            raise ValueError(
                f"step {plan.step} has the strategy of the mesh. Plan it without a strategy."
            )
        if plan.strategy not in self._made:
            own = OfStrategy(link, self._settings)
            linked = Linked(own, self._model, self._groups, self._settings)
            self._made[plan.strategy] = own, linked
        own, linked = self._made[plan.strategy]
        return Surroundings(own.model, own.pipeline, own.groups_of(plan), linked)
